"""The Prometheus port of a process: prometheus_client's WSGI application behind limits on its clients.

Metrics are collected on the event loop, which owns everything that collectors read. Floods of scrapes take little time
from other work: few requests are served at a time, and the metrics are cached briefly.
"""

import asyncio
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import TCPServer
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from specpool.rpc.ports import ListenError
from specpool.rpc.security.channel import join_address

log = logging.getLogger(__name__)

PATH = "/metrics"
BACKLOG = 16
# Metrics are cached for this multiple of the time to collect them, up to a maximum in seconds. Collecting them
# therefore takes at most 1% of the time.
CACHE_FACTOR, MAX_CACHE_SECONDS = 100, 5.0
# Time for a connection to send its request and read the response. Beyond the limit, the oldest connection is closed.
REQUEST_SECONDS, MAX_CONNECTIONS = 10.0, 16
POLL_SECONDS = 0.1

Application: TypeAlias = Callable[[dict[str, Any], Any], Iterable[bytes]]


class MetricsEndpoint:
    """An HTTP server for the metrics of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._metrics: list[Metric] = []
        self._cached_until = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None

    def start(self, host: str, port: int) -> None:
        """Listen. Raises ListenError."""
        self._loop = asyncio.get_running_loop()
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise ListenError("metrics_port", host, port, error) from None
        self._server.set_app(_only_metrics(make_wsgi_app(self, disable_compression=True)))
        threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), name="metrics", daemon=True).start()
        log.info("metrics at http://%s%s", join_address(host, port), PATH)

    async def close(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()

    def collect(self) -> list[Metric]:
        """Return the metrics, from the thread of a request."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(REQUEST_SECONDS)

    async def _collect(self) -> list[Metric]:
        began = time.monotonic()
        if began >= self._cached_until:
            try:
                self._metrics = list(self._registry.collect())
            except Exception:
                log.exception("could not collect metrics")
                raise
            ended = time.monotonic()
            self._cached_until = ended + min(CACHE_FACTOR * (ended - began), MAX_CACHE_SECONDS)
        return self._metrics


def _only_metrics(application: Application) -> Application:
    """Return an application without other paths, and without the library's options of a request.

    Its OpenMetrics format turns colons in names into underscores.
    """

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PATH:
            start_response("404 Not Found", [])
            return [f"metrics are at {PATH}\n".encode()]
        return application({**environ, "QUERY_STRING": "", "HTTP_ACCEPT": ""}, start_response)

    return serve


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing: scrapers call often, and anybody may send anything."""

    def get_stderr(self) -> Any:
        return io.StringIO()  # drop the tracebacks of wsgiref


class _Server(ThreadingWSGIServer):
    """Serves a limited number of connections, each within `REQUEST_SECONDS`."""

    request_queue_size = BACKLOG

    def __init__(self, host: str, port: int) -> None:
        self._open: dict[socket.socket, None] = {}
        """Connections, oldest first."""
        address: Any
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6 and socket.has_dualstack_ipv6():
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)  # without a DNS query for the name of the host
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            self._open.pop(oldest, None)  # its thread may have ended meanwhile
            _abandon(oldest)
        self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        timer = threading.Timer(REQUEST_SECONDS, _abandon, (request,))
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("scrape abandoned", exc_info=True)


def _abandon(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("scrape ended already")
