"""Why a connection to a server fails, found with sockets and TLS of the standard library.

gRPC reports most of these faults as "Socket closed", and its texts change between versions.
"""

import contextlib
import socket
import ssl
from typing import TypeAlias

from specpool.errors import CertificateError, ConnectError, ProtocolError, ResolveError
from specpool.rpc.security.channel import Connector, split_address
from specpool.rpc.security.tls import TlsFiles, client_context

Diagnosis: TypeAlias = tuple[type[ConnectError], str]

TIMEOUT_SECONDS = 1.0
"""For one connection. A diagnosis makes up to three."""
_NO_SUCH_NAME = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}
# Content types of the first TLS record: an alert, or a handshake message.
_TLS_RECORDS = (b"\x15", b"\x16")
# What an HTTP/2 client sends first: the preface and an empty SETTINGS frame. A server's first frame is SETTINGS too.
_SETTINGS = b"\x04"
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)
# X509_V_ERR_*: codes of OpenSSL.
_UNTRUSTED, _OTHER_NAME = {18, 19, 20, 21}, {62, 64}
# In OpenSSL's names of the ways to refuse a client.
_REFUSALS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "HANDSHAKE_FAILURE", "EOF")


def diagnose(connector: Connector) -> Diagnosis | None:
    """Connect like a channel of this connector; return the kind of fault and a message, or None if nothing is wrong.

    Blocks for up to a few seconds. Addresses in other forms than "host:port" are not examined.
    """
    address = connector.address
    if (parts := split_address(address)) is None:
        return None
    host, port = parts
    try:
        return _protocol_fault(connector, host, port) or _handshake_fault(connector, host, port)
    except socket.gaierror as error:
        kind = ResolveError if error.errno in _NO_SUCH_NAME else ConnectError
        return kind, f"cannot resolve the host name of {address}: {error.strerror}"
    except ValueError as error:  # a host that cannot be a name
        return ResolveError, f"cannot resolve the host name of {address}: {error}"
    except OSError as error:
        return ConnectError, f"cannot connect to {address}: {error.strerror or error}"


def _protocol_fault(connector: Connector, host: str, port: int) -> Diagnosis | None:
    address, uses_tls = connector.address, connector.tls_files is not None
    answer = _answer(host, port, _client_hello())
    if answer[:1] in _TLS_RECORDS:
        return None if uses_tls else (ProtocolError, f"{address} requires TLS: set tls_ca")
    if uses_tls:
        return (ProtocolError, f"{address} does not use TLS: connect without tls_ca") if answer else None
    if _answer(host, port, _HTTP2_PREFACE)[3:4] not in (_SETTINGS, b""):
        return ProtocolError, f"{address} is not a gRPC server: check the port"
    return None


def _answer(host: str, port: int, sent: bytes) -> bytes:
    """The first bytes that a server answers; empty if it closes the connection."""
    with socket.create_connection((host, port), TIMEOUT_SECONDS) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        return _received(connection)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(16)
    except ConnectionError:
        return b""


def _client_hello() -> bytes:
    """The first message of a TLS client."""
    context, sent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def _handshake_fault(connector: Connector, host: str, port: int) -> Diagnosis | None:
    files, address, name = connector.tls_files, connector.address, connector.tls_name or host
    if files is None:
        return None
    try:
        if not _is_refused(files, host, port, name):
            return None
    except _NoHttp2Error:
        return ProtocolError, f"{address} is not a gRPC server: check the port"
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message
        if error.verify_code in _OTHER_NAME:
            reason = f"it is not valid for {name!r}; set tls_name to a name in it"
        elif error.verify_code in _UNTRUSTED:
            reason = f"it is not signed by {files.ca} ({reason})"
        return CertificateError, f"cannot trust the certificate of {address}: {reason}"
    if files.cert is None:
        return CertificateError, f"{address} requires a client certificate: set tls_cert and tls_key"
    return CertificateError, f"{address} refuses the client certificate in {files.cert}"


class _NoHttp2Error(Exception):
    """The server does not agree to HTTP/2, which gRPC needs."""


def _is_refused(files: TlsFiles, host: str, port: int, name: str) -> bool:
    """Whether the server refuses the client's certificate, or the lack of one. OSError for other faults.

    In TLS 1.3, a server checks it after the client's handshake. gRPC servers then close the connection without an
    alert, and so does a proxy without a backend. In TLS 1.2, servers refuse it within the handshake.
    """
    context = client_context(files)
    context.set_alpn_protocols(["h2"])
    for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        context.maximum_version = version
        with (
            socket.create_connection((host, port), TIMEOUT_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=name, do_handshake_on_connect=False) as tls,
        ):
            try:
                tls.do_handshake()
                if tls.selected_alpn_protocol() is None:
                    raise _NoHttp2Error
                if _received(tls):
                    return False
            except ssl.SSLCertVerificationError:
                raise
            except (ssl.SSLError, ConnectionError) as error:
                reason = str(getattr(error, "reason", None) or "EOF")
                # A server that has not chosen a cipher has not seen the client's certificate.
                if tls.cipher() is not None and any(word in reason for word in _REFUSALS):
                    return True
                if version is ssl.TLSVersion.TLSv1_3:
                    raise
    return False
