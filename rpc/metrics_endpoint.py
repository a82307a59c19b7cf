"""The port on which Prometheus reads the metrics of a process: `GET /metrics`, and nothing else.

Scrapes are answered on the event loop, where all that collectors read belongs. A scrape takes a few milliseconds of it,
so connections are accepted slowly: however many arrive, they take little from those whom the process serves.
"""

import asyncio
import contextlib
import logging
import os
import socket
from email.message import Message
from http.client import HTTPException, parse_headers
from io import BytesIO

from prometheus_client import CollectorRegistry, make_wsgi_app

from rpc.channel import join_address

log = logging.getLogger(__name__)

PATH = "/metrics"
# Time between two connections that are accepted. The system keeps a few waiting, and refuses the rest.
ACCEPT_SECONDS, MOST_WAITING = 0.05, 16
# A connection that asks or reads more slowly is closed; of more connections than this the oldest is.
REQUEST_SECONDS, MOST_CONNECTIONS = 10.0, 16
MOST_HEAD_BYTES = 16 * 2**10


class MetricsEndpoint:
    """A small HTTP server for the metrics of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._render = make_wsgi_app(registry, disable_compression=True)
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
            with contextlib.suppress(OSError):  # a client that has left already, or no descriptor is free
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                if len(self._open) >= MOST_CONNECTIONS:
                    next(iter(self._open)).cancel()
                task = asyncio.create_task(self._serve(connection))
                self._open[task] = None
                task.add_done_callback(self._open.pop)
            await asyncio.sleep(ACCEPT_SECONDS)

    async def _serve(self, connection: socket.socket) -> None:
        """Answers one request, and closes the connection."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=MOST_HEAD_BYTES)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    return  # a port that is only probed
                except asyncio.LimitOverrunError:
                    writer.write(_response("431 Request Header Fields Too Large"))
                else:
                    writer.write(self._answer(head))
                writer.close()
                await writer.wait_closed()  # once all is sent
        except (OSError, TimeoutError):
            log.debug("a scrape was given up")
        finally:
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        try:
            method, path, headers = _parse(head)
        except (ValueError, HTTPException):
            return _response("400 Bad Request")
        if path.partition("?")[0] != PATH:
            return _response("404 Not Found", body=f"metrics are at {PATH}\n".encode())
        try:
            return self._metrics(method, headers)
        except Exception:
            log.exception("the metrics could not be collected")
            return _response("500 Internal Server Error")

    def _metrics(self, method: str, headers: Message) -> bytes:
        started: list[tuple[str, list[tuple[str, str]]]] = []
        environment = {"REQUEST_METHOD": method, "PATH_INFO": PATH, "HTTP_ACCEPT": headers.get("Accept", "")}
        body = b"".join(self._render(environment, lambda *start: started.append(start)))
        return _response(*started[0], body=body)


def _parse(head: bytes) -> tuple[str, str, Message]:
    """Method, path and headers. ValueError, HTTPException."""
    lines = BytesIO(head)
    method, path, version = lines.readline().decode("ascii").split()
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    return method, path, parse_headers(lines)


def _response(status: str, headers: list[tuple[str, str]] | None = None, body: bytes = b"") -> bytes:
    fields = [*(headers or []), ("Content-Length", str(len(body))), ("Connection", "close")]
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def _listen(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listening = socket.create_server(address, family=family, backlog=MOST_WAITING, dualstack_ipv6=both)
    listening.setblocking(False)
    return listening
