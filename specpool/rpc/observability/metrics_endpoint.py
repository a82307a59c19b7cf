"""The port on which Prometheus reads the metrics of a process: `GET /metrics`, and nothing else.

Scrapes are answered on the event loop, which owns everything that collectors read. However many arrive, they take
little time from other work: connections are accepted slowly, and scrapes soon after another get the same answer.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from specpool.rpc.security.channel import join_address

log = logging.getLogger(__name__)

PATH = "/metrics"
# Time between two connections that are accepted. The system keeps a few waiting, and refuses the rest.
ACCEPT_SECONDS, MAX_WAITING = 0.05, 16
# An answer is reused for this many times as long as it took to make, so that answers take 1% of the time at most; but
# no longer than this many seconds, however long the process was held up while it made one.
KEPT_FOR, MOST_KEPT_SECONDS = 100, 5.0
# A connection that takes longer to ask and read is closed; if there are more connections than this, so is the oldest.
REQUEST_SECONDS, MOST_CONNECTIONS = 10.0, 16
MOST_REQUEST_BYTES = 16 * 2**10


class MetricsEndpoint:
    """A small HTTP server for the metrics of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._text = b""
        self._kept_until = 0.0
        """Time until which `_text` is reused."""
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._open: dict[asyncio.Task[None], None] = {}
        """The tasks that serve connections, the oldest first."""

    def start(self, host: str, port: int) -> None:
        """Listens. OSError says why if it cannot."""
        try:
            self._socket = _listen(host, port)
        except OSError as error:
            reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise OSError(f"metrics_port: cannot listen on {join_address(host, port)}: {reason}") from None
        self._accepting = asyncio.create_task(self._accept(self._socket))
        log.info("metrics at http://%s%s", join_address(host, port), PATH)

    async def close(self) -> None:
        """Ends all connections."""
        tasks = [*self._open, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError):  # the client has left already, or no descriptor is free
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                if len(self._open) >= MOST_CONNECTIONS:
                    next(iter(self._open)).cancel()
                task = asyncio.create_task(self._serve(connection))
                self._open[task] = None
                task.add_done_callback(self._open.pop)
            await asyncio.sleep(ACCEPT_SECONDS)

    async def _serve(self, connection: socket.socket) -> None:
        """Answers one request, and closes the connection."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=MOST_REQUEST_BYTES)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                try:
                    request = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    return  # a port that is only probed
                except asyncio.LimitOverrunError:
                    writer.write(_response("431 Request Header Fields Too Large"))
                else:
                    writer.write(self._answer(request))
                writer.close()
                await writer.wait_closed()  # once all is sent
        except (OSError, TimeoutError):
            log.debug("a scrape was given up")
        finally:
            writer.transport.abort()

    def _answer(self, request: bytes) -> bytes:
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
            # Whatever format the scraper accepts: the library's OpenMetrics turns colons in names into underscores.
            return _response("200 OK", {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}, self._metrics())
        except Exception:
            log.exception("the metrics could not be collected")
            return _response("500 Internal Server Error")

    def _metrics(self) -> bytes:
        began = time.monotonic()
        if began >= self._kept_until:
            self._text = generate_latest(self._registry)
            ended = time.monotonic()
            self._kept_until = ended + min(KEPT_FOR * (ended - began), MOST_KEPT_SECONDS)
        return self._text


def _response(status: str, headers: Mapping[str, str] = MappingProxyType({}), body: bytes = b"") -> bytes:
    fields = {**headers, "Content-Length": len(body), "Connection": "close"}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("ascii") + body


def _listen(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listening = socket.create_server(address, family=family, backlog=MAX_WAITING, dualstack_ipv6=both)
    listening.setblocking(False)
    return listening
