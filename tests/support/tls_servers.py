"""Servers of the standard library, in threads: with TLS, but without gRPC."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import BaseRequestHandler, BaseServer, TCPServer
from threading import Thread
from typing import Any

from certificates import Certificate


@contextmanager
def in_thread(server: BaseServer) -> Iterator[None]:
    """Run a server."""
    thread = Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def tls_server(certificate: Certificate, client_ca: Path | None = None, **options: Any) -> Iterator[str]:
    """Run a TLS server of the standard library that ends every connection after the handshake; yield its address.

    `client_ca`: require client certificates of this CA. `options`: attributes of its context, and `alpn`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    context.set_alpn_protocols(options.pop("alpn", ["h2"]))
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    for name, value in options.items():
        setattr(context, name, value)

    class EndAtOnce(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), context.wrap_socket(self.request, server_side=True):
                pass

    with TCPServer(("127.0.0.1", 0), EndAtOnce) as server, in_thread(server):
        yield f"localhost:{server.server_address[1]}"
