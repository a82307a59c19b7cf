"""A gRPC server as every Specpool process runs it: health, reflection, error mapping, and a drain on SIGTERM."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rpc.channel import join_address
from rpc.interceptor import ErrorInterceptor
from rpc.settings import ServerSettings

log = logging.getLogger(__name__)

LIVE = "live"
"""The health-check name that is SERVING as long as the process answers at all, whatever it waits for."""

PARENT_CHECK_SECONDS = 0.5

SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a surprise
    ("grpc.keepalive_permit_without_calls", 1),
    # A peer that vanished without a word holds no stream open for longer.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]


def process_name(pid: int) -> str:
    """The health-check name that only the process with this id has; another server on its port does not know it."""
    return f"process-{pid}"


class Server:
    """A server with health checks, reflection and a drain. Starts NOT_SERVING; its owner says when it serves."""

    def __init__(self, settings: ServerSettings, max_message_bytes: int) -> None:
        """`max_message_bytes`: larger requests are refused with RESOURCE_EXHAUSTED before they are read."""
        self._settings = settings
        self._health = health.aio.HealthServicer()
        self._services: list[str] = []
        self._stopping = asyncio.Event()
        self._orphaned: asyncio.Task[None] | None = None
        self._grace = settings.drain_seconds
        self.on_drain: Callable[[], None] | None = None
        """Called when the drain begins."""
        options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=options)

    def add(self, name: str, register: Callable[[Any, grpc.aio.Server], None], servicer: Any) -> None:
        """Adds the service of full `name` by the `add_..._to_server` function of its stubs."""
        register(servicer, self._server)
        self._services.append(name)

    async def start(self) -> int:
        """Listens, and returns the port. OSError says why if it cannot."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)
        host, port = self._settings.host, self._settings.port
        try:
            port = self._server.add_insecure_port(join_address(host, port))
        except RuntimeError as error:
            reason = _reason_not_to_listen(host, port) or error
            raise OSError(f"cannot listen on {join_address(host, port)}: {reason}") from None
        await self._server.start()
        log.info("listening on %s", join_address(host, port))
        return port

    async def set_serving(self, serving: bool) -> None:
        """Sets what health checks answer, for the process ("" and its own name) and for each of its services."""
        if serving and self._stopping.is_set():
            return
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", process_name(os.getpid()), *self._services):
            await self._health.set(name, status)

    def stop_on_signals(self) -> None:
        """Drains on SIGTERM and SIGINT, and stops at once when the parent process that the settings name has ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        if self._settings.parent_pid is not None:
            self._orphaned = loop.create_task(self._stop_when_orphaned(self._settings.parent_pid))

    def stop(self, drain: bool = True) -> None:
        """Begins the drain, or ends running calls at once; `wait_stopped` sees it through."""
        if not drain:
            self._grace = 0.0
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """Whether the drain has begun: new work is refused."""
        return self._stopping.is_set()

    async def wait_stopped(self) -> None:
        """Serves until `stop`, then gives running calls their time to end, and cancels the rest."""
        await self._stopping.wait()
        log.info("draining for at most %g s", self._grace)
        await self.set_serving(False)
        if self.on_drain is not None:
            self.on_drain()
        await self._server.stop(self._grace)
        log.info("stopped")

    async def _stop_when_orphaned(self, parent_pid: int) -> None:
        while True:
            await asyncio.sleep(PARENT_CHECK_SECONDS)
            if os.getppid() != parent_pid:
                log.warning("the process that started this one is gone")
                return self.stop(drain=False)


def _reason_not_to_listen(host: str, port: int) -> str | None:
    """The system's own error, which gRPC does not pass on; None if listening would work by now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        return error.strerror
    return None


def configure_logging(level: str) -> None:
    """Logs to stderr, one line per event."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
