"""Identifies and authenticates callers. Limits, fairness and ownership of requests depend on the caller."""

from collections.abc import Collection
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE

from specpool.protocol.errors import PermissionDeniedError, UnauthenticatedError
from specpool.rpc.security.tokens import HEADER, ApiTokens

_authenticated: ContextVar[str | None] = ContextVar("authenticated", default=None)
"""The authenticated client of the call that this task serves."""

# Properties of a connection that name the owner of its certificate, most specific first.
_NAMES = ("peer_dns", "peer_uri", "x509_common_name")


def client_of(context: Any) -> str:
    """Return the client of a call, from within the task that serves it.

    "token:NAME" with an API token, otherwise "cert:NAME" with a certificate, otherwise the host without the port
    ("ipv4:HOST", "ipv6:HOST").
    """
    if (client := _authenticated.get()) is not None:
        return client
    peer: str = context.peer()
    kind, _, address = peer.partition(":")
    return f"{kind}:{address.rpartition(':')[0]}" if kind in ("ipv4", "ipv6") else peer


def is_authenticated() -> bool:
    """Return whether the caller has a valid credential, from within the task that serves its call."""
    return _authenticated.get() is not None


class Authenticator:
    """Admits known callers only, before anything of their request is read.

    Health checks are open to everyone. A valid credential identifies their caller too.
    """

    def __init__(
        self, tokens: Path | None = None, with_certificates: bool = False, allowed_names: Collection[str] = ()
    ) -> None:
        """Raise ValueError if the tokens file is invalid.

        `tokens`: file of API tokens; if set, every call needs one. `with_certificates`: whether TLS verifies client
        certificates. `allowed_names`: names that a certificate must have one of; empty: any name.
        """
        self._tokens = ApiTokens(tokens) if tokens is not None else None
        self._with_certificates, self._allowed = with_certificates, frozenset(allowed_names)

    def check_token(self, details: grpc.HandlerCallDetails) -> None:
        """Identify the caller by its API token. Raises UnauthenticatedError."""
        if self._tokens is None:
            return
        name = self._tokens.caller(details.invocation_metadata)
        if name is not None:
            _authenticated.set(f"token:{name}")
        elif not is_health(details):
            is_given = any(key == HEADER for key, _ in details.invocation_metadata or ())
            problem = 'must be "Bearer" and a known API token' if is_given else "missing; this server needs a token"
            raise UnauthenticatedError(f"{HEADER}: {problem}")

    def check_certificate(self, details: grpc.HandlerCallDetails, context: Any) -> None:
        """Identify the caller by its certificate, unless its token has. Raises PermissionDeniedError."""
        if not self._with_certificates:
            return
        properties = context.auth_context()
        names = [name.decode(errors="replace") for kind in _NAMES for name in properties.get(kind, ())]
        accepted = [name for name in names if name in self._allowed] if self._allowed else names
        if self._allowed and not accepted and not is_health(details):
            shown = ", ".join(map(repr, names)) or "no name"
            raise PermissionDeniedError(
                f"allowed_names: the certificate has none of the allowed names (it has {shown})"
            )
        if accepted and _authenticated.get() is None:
            _authenticated.set(f"cert:{accepted[0]}")


def is_health(details: grpc.HandlerCallDetails) -> bool:
    """Return whether a call is a health check, which needs no credentials."""
    return bool(details.method.startswith(f"/{HEALTH_SERVICE}/"))
