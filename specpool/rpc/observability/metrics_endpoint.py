"""The Prometheus port of a process. It serves `GET /metrics` and nothing else.

Scrapes run on the event loop, which owns everything that collectors read. Floods of scrapes take little time from other
work: connections are accepted at a limited rate, and responses are cached briefly.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from specpool.rpc.ports import ListenError
from specpool.rpc.security.channel import join_address

log = logging.getLogger(__name__)

PATH = "/metrics"
# Pause between two accepted connections, and the listen backlog.
ACCEPT_SECONDS, BACKLOG = 0.05, 16
# A response is cached for this multiple of the time it took, up to a maximum in seconds. Scrapes therefore take at most
# 1% of the time.
CACHE_FACTOR, MAX_CACHE_SECONDS = 100, 5.0
# Time for a connection to send its request and read the response. Beyond the limit, the oldest connection is closed.
REQUEST_SECONDS, MAX_CONNECTIONS = 10.0, 16
MAX_REQUEST_BYTES = 16 * 2**10


class MetricsEndpoint:
    """A small HTTP server for the metrics of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._text = b""
        self._cached_until = 0.0
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._open: dict[asyncio.Task[None], None] = {}
        """Tasks that serve connections, oldest first."""

    def start(self, host: str, port: int) -> None:
        """Listen. Raises ListenError."""
        try:
            self._socket = _listen(host, port)
        except OSError as error:
            raise ListenError("metrics_port", host, port, error) from None
        self._accepting = asyncio.create_task(self._accept(self._socket))
        log.info("metrics at http://%s%s", join_address(host, port), PATH)

    async def close(self) -> None:
        tasks = [*self._open, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError):  # client disconnected, or out of file descriptors
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                if len(self._open) >= MAX_CONNECTIONS:
                    next(iter(self._open)).cancel()
                task = asyncio.create_task(self._serve(connection))
                self._open[task] = None
                task.add_done_callback(self._open.pop)
            await asyncio.sleep(ACCEPT_SECONDS)

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one request and close the connection."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_REQUEST_BYTES)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                try:
                    request = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    return  # a port scan or a TCP probe
                except asyncio.LimitOverrunError:
                    writer.write(_response("431 Request Header Fields Too Large"))
                else:
                    writer.write(self._respond(request))
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            log.debug("scrape abandoned")
        finally:
            writer.transport.abort()

    def _respond(self, request: bytes) -> bytes:
        try:
            method, path, version = request.split(b"\r\n", 1)[0].decode("ascii").split()
        except ValueError:
            return _response("400 Bad Request")
        if not version.startswith("HTTP/1."):
            return _response("400 Bad Request")
        if path.partition("?")[0] != PATH:
            return _response("404 Not Found", body=f"metrics are at {PATH}\n".encode())
        if method != "GET":
            return _response("405 Method Not Allowed", {"Allow": "GET"})
        try:
            # Ignore the Accept header: the library's OpenMetrics format turns colons in names into underscores.
            return _response("200 OK", {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}, self._metrics())
        except Exception:
            log.exception("could not collect metrics")
            return _response("500 Internal Server Error")

    def _metrics(self) -> bytes:
        began = time.monotonic()
        if began >= self._cached_until:
            self._text = generate_latest(self._registry)
            ended = time.monotonic()
            self._cached_until = ended + min(CACHE_FACTOR * (ended - began), MAX_CACHE_SECONDS)
        return self._text


def _response(status: str, headers: Mapping[str, str] = MappingProxyType({}), body: bytes = b"") -> bytes:
    fields = {**headers, "Content-Length": len(body), "Connection": "close"}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("ascii") + body


def _listen(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    dual_stack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listening = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=dual_stack)
    listening.setblocking(False)
    return listening
