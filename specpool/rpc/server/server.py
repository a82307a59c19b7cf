"""The gRPC server of every Specpool process, with health checks, reflection, TLS and a drain on SIGTERM."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_reflection.v1alpha import reflection

from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.observability.metrics import CallCounter, server_registry
from specpool.rpc.observability.metrics_endpoint import MetricsEndpoint
from specpool.rpc.ports import ListenError, check_port, is_loopback, wait_closed
from specpool.rpc.security.channel import join_address
from specpool.rpc.security.tls import server_credentials
from specpool.rpc.server.callers import Authenticator
from specpool.rpc.server.calls import Rates
from specpool.rpc.server.connections import connection_options
from specpool.rpc.server.health import MAX_HEALTH_REQUEST_BYTES, HealthServicer, process_name
from specpool.rpc.server.interceptor import CallInterceptor
from specpool.rpc.server.signals import StopSignals, wait_orphaned

log = logging.getLogger(__name__)

LIVE = "live"
"""Name of the liveness check: SERVING unless a restart of the process would help."""

HEALTH_MESSAGE = ("grpc.max_receive_message_length", MAX_HEALTH_REQUEST_BYTES)


class Server:
    """A gRPC server that starts NOT_SERVING. Its owner decides when it serves."""

    def __init__(self, settings: ServerSettings, max_message_bytes: int, rates: Rates | None = None) -> None:
        """Raise ValueError for unusable TLS or token files.

        `max_message_bytes`: larger requests fail with RESOURCE_EXHAUSTED before they are read.
        """
        self._settings, self._rates = settings, rates or Rates()
        self._health = HealthServicer()
        self._services: list[str] = []
        self._stopping, self._cut_off = asyncio.Event(), asyncio.Event()
        self.has_failed = False
        """Whether gRPC has closed a port. The process must exit with an error, so that it is restarted."""
        self._watches: list[asyncio.Task[None]] = []
        self._signals: StopSignals | None = None
        self.on_drain: Callable[[], None] | None = None
        """Called when the drain begins."""
        self._credentials = server_credentials(settings.tls_files) if settings.tls_files is not None else None
        self._counter = CallCounter() if settings.metrics_port is not None else None
        self.registry = server_registry(self._counter)
        """Collectors of metrics. Only read if the settings have a `metrics_port`."""
        self._metrics = MetricsEndpoint(self.registry)
        authenticator = Authenticator(settings.api_tokens, settings.tls_ca is not None, settings.allowed_names)
        interceptor = CallInterceptor(settings, authenticator, self._counter, self._rates)
        self._calls, self.refusals = interceptor.calls, interceptor.refusals
        options = connection_options(settings, self._rates)
        message_limit = ("grpc.max_receive_message_length", max_message_bytes)
        self._server = grpc.aio.server(interceptors=[interceptor], options=[*options, message_limit])
        self._health_server: grpc.aio.Server | None = None
        if settings.health_port is not None:  # probes get through without TLS and beside the limits of clients
            interceptor = CallInterceptor(settings, Authenticator(), self._counter, self._rates)
            self._health_server = grpc.aio.server(interceptors=[interceptor], options=[*options, HEALTH_MESSAGE])

    def add(self, name: str, register: Callable[[Any, grpc.aio.Server], None], servicer: Any) -> None:
        """Add a service. `register`: the `add_..._to_server` function of its stubs."""
        register(servicer, self._server)
        self._services.append(name)

    async def start(self) -> int:
        """Listen, and return the port. Raises ListenError."""
        for server in self._servers():
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*self._services, HEALTH_SERVICE, reflection.SERVICE_NAME)
        if self._settings.reflection:
            reflection.enable_server_reflection(names, self._server)
        self._health.set(LIVE, True)
        self.set_serving(False)
        host, health_port = self._settings.host, self._settings.health_port
        monitoring_host = self._settings.monitoring_host or host
        port = _listen("port", host, self._settings.port, self._add_port)
        if self._health_server is not None and health_port is not None:
            _listen("health_port", monitoring_host, health_port, self._health_server.add_insecure_port)
        if self._counter is not None and self._settings.metrics_port is not None:
            self._counter.add_services(names)
            self._metrics.start(monitoring_host, self._settings.metrics_port)
        for server in self._servers():
            await server.start()
        self._watch_port(host, port)
        if health_port is not None:
            self._watch_port(monitoring_host, health_port)
        log.info("listening on %s%s", join_address(host, port), " with TLS" if self._credentials is not None else "")
        if self._settings.api_tokens is not None and self._credentials is None and not is_loopback(host):
            log.warning("--api-tokens is set without --tls-cert: tokens travel in plain text")
        return port

    def _watch_port(self, host: str, port: int) -> None:
        self._watches.append(asyncio.create_task(self._stop_when_closed(host, port)))

    def _servers(self) -> list[grpc.aio.Server]:
        return [self._server, *([self._health_server] if self._health_server is not None else [])]

    def _add_port(self, address: str) -> int:
        if self._credentials is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, self._credentials)

    def set_serving(self, serving: bool) -> None:
        """Set the health of the process ("" and its own name) and of each of its services."""
        for name in ("", process_name(os.getpid()), *self._services):
            self._health.set(name, serving and not self.stopping)

    def set_live(self, live: bool) -> None:
        """Set the liveness check. False asks for a restart of the process."""
        self._health.set(LIVE, live)

    def stop_on_signals(self) -> StopSignals:
        """Drain on SIGTERM and SIGINT. Stop at once on a second signal, or when the `parent_pid` of the settings exits.

        The process must exit soon after `wait_stopped`.
        """
        self._signals = StopSignals(self._stop_on_signal, lambda: self.stop(drain=False))
        if self._settings.parent_pid is not None:
            self._watches.append(asyncio.create_task(self._stop_when_orphaned(self._settings.parent_pid)))
        return self._signals

    def _stop_on_signal(self) -> None:
        if self._calls.count:
            seconds = self._settings.drain_seconds
            log.info("draining: calls in progress (%d) have up to %g s to finish", self._calls.count, seconds)
        self.stop()

    def stop(self, drain: bool = True) -> None:
        """Begin the drain, or without `drain` end running calls at once. `wait_stopped` completes the stop."""
        if not drain:
            self._cut_off.set()
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """Whether the drain has begun. New work is refused from then on."""
        return self._stopping.is_set()

    async def wait_stopping(self) -> None:
        await self._stopping.wait()

    async def wait_stopped(self) -> None:
        """Serve until `stop`, let running calls finish within `drain_seconds`, and fail the rest as UNAVAILABLE."""
        await self._stopping.wait()
        seconds = self._settings.drain_seconds
        self.set_serving(False)
        self._health.end_watches()
        if self.on_drain is not None:
            self.on_drain()
        endings = (
            self._server.stop(seconds + 2 * self._rates.last_calls_seconds),
            self._calls_ended(),
            self._cut_off.wait(),
        )
        tasks = [asyncio.create_task(ending) for ending in endings]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        self._calls.cancel()
        with contextlib.suppress(TimeoutError):  # clients that do not read get no status
            async with asyncio.timeout(self._rates.last_calls_seconds):
                await self._calls.idle.wait()
        for server in self._servers():
            await server.stop(None)
        for watch in self._watches:
            watch.cancel()
        await self._metrics.close()
        if self._signals is not None:
            self._signals.server_stopped()

    async def _calls_ended(self) -> None:
        """Wait for the end of all calls except health and reflection, which clients may keep open."""
        while True:
            await self._calls.idle.wait()
            await asyncio.sleep(self._rates.last_calls_seconds)
            if self._calls.idle.is_set():
                return

    async def _stop_when_closed(self, host: str, port: int) -> None:
        """Stop if gRPC's server closes a port, as after a call whose path is not UTF-8. Nothing can reopen it."""
        await wait_closed(host, port, self._rates.port_check_seconds)
        if not self.stopping:
            self.has_failed = True
            log.error("gRPC has closed %s; exiting with status 1 for a restart", join_address(host, port))
            self.set_live(False)
            self.stop(drain=False)

    async def _stop_when_orphaned(self, parent_pid: int) -> None:
        await wait_orphaned(parent_pid)
        self.stop(drain=False)


def _listen(setting: str, host: str, port: int, add_port: Callable[[str], int]) -> int:
    """Add a port and return it. Raises ListenError."""
    check_port(setting, host, port)  # gRPC gives no reason, and logs lines of its own
    try:
        return add_port(join_address(host, port))
    except RuntimeError as error:
        raise ListenError(setting, host, port, error) from None
