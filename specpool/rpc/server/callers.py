"""Who makes a call: limits, fairness and the ownership of requests depend on it. Callers are authenticated here,
too."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE

from specpool.protocol.errors import PermissionDeniedError, ServiceError, UnauthenticatedError
from specpool.rpc.errors import status_of
from specpool.rpc.security.tokens import ApiTokens

log = logging.getLogger(__name__)

Handler: TypeAlias = Any  # grpc.RpcMethodHandler, whose stubs know no asyncio

_authenticated: ContextVar[str | None] = ContextVar("authenticated", default=None)
"""The client of the call that the present task serves, if it has proven who it is."""

# Properties of a connection that name the owner of its certificate, from the most specific one on.
_NAMES = ("peer_dns", "peer_uri", "x509_common_name")


def client_of(context: Any) -> str:
    """The client of a call, in the task that serves it: "token:NAME" by its API token, "cert:NAME" by its certificate,
    or else its host ("ipv4:HOST", "ipv6:HOST"), without the port, which every connection has for itself."""
    if (client := _authenticated.get()) is not None:
        return client
    peer: str = context.peer()
    kind, _, address = peer.partition(":")
    return f"{kind}:{address.rpartition(':')[0]}" if kind in ("ipv4", "ipv6") else peer


class Authenticator(grpc.aio.ServerInterceptor):
    """Lets only known callers through, before anything of their request is read; health checks are for everybody.

    Its refusals are not marked as answers of a handler: they say nothing about the request.
    """

    def __init__(self, tokens: Path | None, with_certificates: bool, allowed_names: Collection[str] = ()) -> None:
        """`tokens`: file of the API tokens, one of which every call must bring. `with_certificates`: the handshake has
        verified a certificate of every client, which must have one of the `allowed_names`; empty: any name will do.

        ValueError for a file that cannot be used.
        """
        self._tokens = ApiTokens(tokens) if tokens is not None else None
        self._with_certificates, self._allowed = with_certificates, frozenset(allowed_names)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        if details.method.startswith(f"/{HEALTH_SERVICE}/"):
            return await continuation(details)
        if self._tokens is not None:
            name = self._tokens.caller(details.invocation_metadata)
            if name is None:
                return _refusal(UnauthenticatedError('authorization: must be "Bearer" and an API token of this server'))
            _authenticated.set(f"token:{name}")
        handler = await continuation(details)
        if handler is None or not self._with_certificates:
            return handler
        return _once(self._admit, handler)

    async def _admit(self, context: Any) -> None:
        """Ends the call of a client whose certificate has no allowed name."""
        properties = context.auth_context()
        names = [name.decode(errors="replace") for kind in _NAMES for name in properties.get(kind, ())]
        accepted = [name for name in names if name in self._allowed] if self._allowed else names
        if self._allowed and not accepted:
            shown = ", ".join(map(repr, names)) or "no name"
            await _refuse(PermissionDeniedError(f"allowed_names: none of the certificate's names ({shown})"), context)
        if accepted and _authenticated.get() is None:
            _authenticated.set(f"cert:{accepted[0]}")


def _once(admit: Callable[[Any], Awaitable[None]], handler: Handler) -> Handler:
    """The handler, run after `admit`. Handlers of streams of requests, as all here are, have read nothing by then."""

    async def answer_all(requests: AsyncIterator[bytes], context: Any) -> None:
        await admit(context)
        await handler.stream_stream(requests, context)

    async def answer_one(requests: AsyncIterator[bytes], context: Any) -> Any:
        await admit(context)
        return await handler.stream_unary(requests, context)

    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(answer_all, response_serializer=handler.response_serializer)
    return grpc.stream_unary_rpc_method_handler(answer_one, response_serializer=handler.response_serializer)


def _refusal(error: ServiceError) -> Handler:
    """A handler for methods of every kind, which answers with the error and reads nothing."""

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> None:
        await _refuse(error, context)

    return grpc.stream_unary_rpc_method_handler(refuse)


async def _refuse(error: ServiceError, context: Any) -> NoReturn:
    log.debug("refused a call of %s: %s", context.peer(), error)
    await context.abort(*status_of(error))
    raise AssertionError("abort always raises")
