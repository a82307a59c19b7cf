"""How `specpool up` secures its coordinator, and connects to it to see whether it serves."""

import contextlib
import ssl
from pathlib import Path
from typing import Any

from specpool.cli.processes import ProcessFailedError
from specpool.rpc.security.channel import SecurityOptions
from specpool.rpc.security.settings import ServerSecurity

FILES = ("tls_cert", "tls_key", "tls_ca", "api_tokens")
# Messages of a handshake: three in TLS 1.3, four in TLS 1.2.
MOST_MESSAGES = 4


def coordinator_flags(security: ServerSecurity) -> list[str]:
    """Flags of a coordinator with this security, whose workers are on this machine and without TLS."""
    flags = ["--no-worker-tls", "--reflection" if security.reflection else "--no-reflection"]
    for name in FILES:
        if (path := getattr(security, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", str(path)]
    return [*flags, "--allowed-names", ",".join(security.allowed_names)] if security.allowed_names else flags


def own_security(security: ServerSecurity) -> SecurityOptions:
    """Options of a health check of that coordinator: it trusts exactly the coordinator's certificate, and shows the
    same one.

    ProcessFailedError for a certificate with which no connection is possible: expired, or not good for a client where
    the coordinator asks for one.
    """
    cert, key = security.tls_cert, security.tls_key
    if cert is None or key is None:
        return SecurityOptions()
    try:
        name = _name(_handshake(cert, key, security.tls_ca))
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error.reason
        checked = " to itself as a client" if security.tls_ca is not None else ""
        raise ProcessFailedError(f"tls_cert: the coordinator cannot show {cert}{checked}: {reason}") from None
    return SecurityOptions(tls_ca=cert, tls_cert=cert, tls_key=key, tls_name=name)


def _handshake(cert: Path, key: Path, ca: Path | None) -> dict[str, Any]:
    """The certificate as the client of a handshake in memory sees it. ssl.SSLError if either side refuses the other."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.load_cert_chain(cert, key)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusts the certificate without the CA that has signed it
    client.load_verify_locations(cert)
    if ca is not None:
        server.verify_mode = ssl.CERT_REQUIRED
        server.load_verify_locations(ca)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near, far = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(MOST_MESSAGES):
        for end in (near, far):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return near.getpeercert() or {}


def _name(certificate: dict[str, Any]) -> str | None:
    """A name for which the certificate is good."""
    names = dict(reversed(certificate.get("subjectAltName", ())))
    common = dict(pair for group in certificate.get("subject", ()) for pair in group).get("commonName")
    name: str | None = names.get("DNS", names.get("IP Address", common))
    return name.replace("*", "any") if name is not None else None
