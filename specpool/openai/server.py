"""The HTTP server process: uvicorn with TLS files that reload, and a drain on SIGTERM."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from specpool.openai.app import Handlers
from specpool.openai.coordinators import Coordinators
from specpool.openai.errors import unavailable
from specpool.openai.metrics import Observed
from specpool.openai.protocol import Protocol
from specpool.openai.reply import Reply
from specpool.openai.settings import OpenAISettings
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging
from specpool.rpc.ports import ListenError, is_loopback
from specpool.rpc.security.channel import join_address
from specpool.rpc.security.tls import Reloaded, TlsFiles
from specpool.rpc.server.connections import max_connections
from specpool.rpc.server.signals import StopSignals, wait_orphaned

PROGRAM = "specpool-openai"
BACKLOG = 2048
REFUSED_CONNECTIONS = 64
"""Connections above the limit that get a 503 answer. Further ones are closed at once."""
PROBED = ("/health", "/metrics")
"""Routes served above the limit too: failing probes would restart the server and cut its requests."""
KEEP_ALIVE_PROBE_SECONDS = 20
UNREAD_BYTES = 64 * 2**10
"""Send buffer of a connection, which holds a stream's data for a client that does not read."""
LAST_SECONDS = 0.5
"""Time for clients to read the errors that end requests after the drain."""

log = logging.getLogger(__name__)


class Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class OpenAIServer:
    """The server. Call `start`, then `wait_stopped`."""

    def __init__(self, settings: OpenAISettings) -> None:
        """Needs a running event loop."""
        self._settings = settings
        self.coordinators = Coordinators(settings.coordinators, settings.coordinator_security)
        self.handlers = Handlers(settings, self.coordinators)
        files = settings.tls_files
        tls = ServerContext(files) if files is not None else None
        self._max_connections = max_connections(settings.max_connections)
        self._routes = self.handlers.app()
        self._uvicorn = Uvicorn(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                log_config=None,
                access_log=False,
                lifespan="off",
                http=Protocol,
                ws="none",
                server_header=False,
                backlog=BACKLOG,
                limit_concurrency=self._max_connections + REFUSED_CONNECTIONS + 1,
                h11_max_incomplete_event_size=int(settings.max_header_bytes),
                timeout_keep_alive=settings.keep_alive_seconds,
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
        )
        self._running: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._stopping, self._cut_off = asyncio.Event(), asyncio.Event()

    async def start(self) -> int:
        """Listen, and return the port. Raises ListenError."""
        settings = self._settings
        listener = _listener(settings.host, settings.port, settings.stream_stall_seconds)
        port: int = listener.getsockname()[1]
        self._running = asyncio.create_task(self._uvicorn.serve([listener]))
        self._ending = asyncio.create_task(self._end_requests())
        suffix = " with TLS" if settings.tls_files is not None else ""
        log.info("listening on %s%s", join_address(settings.host, port), suffix)
        if settings.tls_files is None and not is_loopback(settings.host):
            log.warning("--tls-cert is not set: tokens, prompts and answers travel in plain text")
        return port

    def stop(self, drain: bool = True) -> None:
        """Begin the drain, or without `drain` end running requests at once."""
        if drain and not self._uvicorn.should_exit and (requests := len(self._uvicorn.server_state.tasks)):
            log.info("draining: %d requests have up to %g s to finish", requests, self._settings.drain_seconds)
        self._uvicorn.should_exit = True
        self._stopping.set()
        if not drain:
            self._cut_off.set()

    async def wait_stopped(self) -> None:
        """Serve until `stop`, let running requests finish within `drain_seconds`, and fail the rest."""
        assert self._running is not None
        assert self._ending is not None
        await self._running
        self._ending.cancel()
        await self.coordinators.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["path"] in PROBED or len(self._uvicorn.server_state.connections) <= self._max_connections:
            await self._routes(scope, receive, send)
            return
        log.warning("refusing a request: more than %d connections (--max-connections)", self._max_connections)
        refused = unavailable("too many connections")
        headers = {**refused.all_headers(), "connection": "close"}
        await Reply(send, Observed()).json(refused.body(), refused.status, headers)

    async def _end_requests(self) -> None:
        """End the requests that outlast the drain."""
        await self._stopping.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_seconds):
                await self._cut_off.wait()
        state = self._uvicorn.server_state
        for task in state.tasks:
            task.cancel()
        await asyncio.sleep(LAST_SECONDS)
        for connection in list(state.connections):  # their clients do not read
            connection.transport.abort()


async def serve(settings: OpenAISettings) -> None:
    server = OpenAIServer(settings)
    signals = StopSignals(server.stop, lambda: server.stop(drain=False))
    await server.start()
    orphaned = None
    if settings.parent_pid is not None:
        orphaned = asyncio.create_task(wait_orphaned(settings.parent_pid))
        orphaned.add_done_callback(lambda _: server.stop(drain=False))
    await server.wait_stopped()
    signals.server_stopped()
    if orphaned is not None:
        orphaned.cancel()
    log.info("stopped")


class ServerContext(ssl.SSLContext):
    """The TLS context of a server. Every handshake uses the current files, and resumes no session of earlier ones."""

    def __new__(cls, files: TlsFiles) -> "ServerContext":
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: TlsFiles) -> None:
        """Raises ValueError as `TlsFiles.load` does."""
        self._files = files
        self._contexts: Reloaded[ssl.SSLContext] = Reloaded(files.paths, self._load)

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Begin a handshake, as asyncio does."""
        return self._contexts.current().wrap_bio(*args, **options)

    def _load(self) -> ssl.SSLContext:
        self._files.load()
        assert self._files.cert is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files.cert, self._files.key)
        if self._files.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self._files.ca)
        return context


def _listener(host: str, port: int, stall_seconds: float) -> socket.socket:
    """Listen. Connections end when their peer is gone, or reads nothing for `stall_seconds`."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ListenError("port", host, port, error) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * stall_seconds))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_PROBE_SECONDS)
    return listener


def main() -> None:
    settings = OpenAISettings.load(PROGRAM)
    configure_logging(settings.log_level, settings.log_format, PROGRAM)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings quote client input
    settings.log_resolved()
    with naming(PROGRAM, "", ListenError):
        asyncio.run(serve(settings))
