"""TLS options for health checks of the coordinator that `specpool up` starts."""

import contextlib
import ssl
from pathlib import Path
from typing import Any

from specpool.cli.processes import ProcessFailedError
from specpool.rpc.security.channel import SecurityOptions
from specpool.rpc.security.settings import ServerSecurity

# A handshake has three messages in TLS 1.3, and four in TLS 1.2.
MAX_MESSAGES = 4


def health_check_security(security: ServerSecurity) -> SecurityOptions:
    """Return connection options for a coordinator with this security: trust only its certificate, and present it.

    ProcessFailedError if the certificate has expired, or is invalid for clients although the coordinator requires that.
    """
    cert, key = security.tls_cert, security.tls_key
    if cert is None or key is None:
        return SecurityOptions()
    try:
        name = _name(_handshake(cert, key, security.tls_ca))
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error.reason
        role = " as a client certificate" if security.tls_ca is not None else ""
        raise ProcessFailedError(f"tls_cert: the coordinator cannot use {cert}{role}: {reason}") from None
    return SecurityOptions(tls_ca=cert, tls_cert=cert, tls_key=key, tls_name=name)


def _handshake(cert: Path, key: Path, ca: Path | None) -> dict[str, Any]:
    """Return the server's certificate as seen in an in-memory handshake. Raises ssl.SSLError if it fails."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.load_cert_chain(cert, key)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust the certificate without its CA
    client.load_verify_locations(cert)
    if ca is not None:
        server.verify_mode = ssl.CERT_REQUIRED
        server.load_verify_locations(ca)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(MAX_MESSAGES):
        for side in (client_side, server_side):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return client_side.getpeercert() or {}


def _name(certificate: dict[str, Any]) -> str | None:
    """Return a name for which the certificate is valid."""
    names = dict(reversed(certificate.get("subjectAltName", ())))
    common = dict(pair for group in certificate.get("subject", ()) for pair in group).get("commonName")
    name: str | None = names.get("DNS", names.get("IP Address", common))
    return name.replace("*", "any") if name is not None else None
