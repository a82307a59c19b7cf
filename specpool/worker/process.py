"""The life cycle of a worker process: it listens at once, serves once the model is loaded, and drains on SIGTERM."""

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import end_process
from specpool.rpc.observability.tracing import Tracer, tracer_of
from specpool.rpc.ports import ListenError
from specpool.rpc.security.channel import MAX_ROUND_BYTES
from specpool.rpc.server.server import Server
from specpool.worker.backend import Backend, DeviceFailedError
from specpool.worker.host import WorkerHost
from specpool.worker.metrics import WorkerMetrics
from specpool.worker.servicer import WorkerServicer
from specpool.worker.settings import WorkerSettings

log = logging.getLogger(__name__)
SWITCH_SECONDS = 0.0005
"""Maximum time that the model thread waits for the event loop's Python code. The default of 5 ms is a whole pass."""
CLOSE_SECONDS = 5.0
"""Time for a running pass to finish after the drain."""


def run_worker(
    program: str,
    settings: WorkerSettings,
    load: Callable[[Callable[[str], None]], Backend],
    service: str,
    register: Callable[[Any, Any], None],
    servicer: type[WorkerServicer],
    refusals: tuple[type[Exception], ...],
) -> None:
    """Run a worker until SIGTERM: `load` builds its backend and reports phases, and `servicer` serves it as `service`.

    An error of a type in `refusals` means that the settings are wrong: the process ends with one line and status 2.
    """
    settings.log_resolved()
    sys.setswitchinterval(SWITCH_SECONDS)
    host = WorkerHost(load)

    def add_service(server: Server) -> None:
        server.add(service, register, servicer(host, tracer))
        server.registry.register(WorkerMetrics(program.removeprefix("specpool-").removesuffix("-worker"), host))

    try:
        with naming(program, "", ListenError, *refusals):
            tracer = tracer_of(settings, program)
            asyncio.run(_serve(settings, host, add_service, tracer))
    except (OSError, DeviceFailedError) as error:
        end_process(f"{program}: {error}", 1)
    finally:
        # Skip the garbage collection at exit: scanning torch's objects takes a second or more.
        gc.freeze()


@contextmanager
def importing(report: Callable[[str], None]) -> Iterator[None]:
    """Import torch without garbage collection, and exempt the imported objects from later collections."""
    if "torch" in sys.modules:
        yield
        return
    report("importing torch")
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


async def _serve(
    settings: WorkerSettings, host: WorkerHost, add_service: Callable[[Server], None], tracer: Tracer | None = None
) -> None:
    """Serve until a stop signal. Raises the error if loading fails."""
    server = Server(settings, MAX_ROUND_BYTES)
    add_service(server)
    server.stop_on_signals()  # before anything that takes time
    await server.start()

    ending: asyncio.TimerHandle | None = None

    def on_hang_change(hangs: bool) -> None:
        nonlocal ending
        server.set_live(not hangs)
        server.set_serving(not hangs)
        if hangs:
            reason = "the model has hung for twice --watchdog-seconds"
            ending = asyncio.get_running_loop().call_later(settings.watchdog_seconds, _end, reason)
        elif ending is not None:
            ending.cancel()

    def drain() -> None:
        host.drain()
        if host.hanging is not None:
            server.stop(drain=False)

    async def load_and_serve() -> None:
        await host.load()
        gc.freeze()  # a full collection of what has been loaded takes as long as dozens of passes
        server.set_serving(True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(host.expire_leases(settings.lease_seconds))
            if settings.watchdog_seconds:
                tasks.create_task(host.watch(settings.watchdog_seconds, on_hang_change))

    server.on_drain, host.on_failure = drain, _end
    serving = asyncio.create_task(load_and_serve())
    serving.add_done_callback(lambda task: server.stop())
    await server.wait_stopped()
    if not serving.done() and not host.is_loaded:
        log.info("stopped while loading the model")
        os._exit(int(server.has_failed))  # nothing can interrupt the thread that loads
    serving.cancel()
    if tracer is not None:
        await tracer.close()
    if not host.close(CLOSE_SECONDS):
        log.error("stopped while the model was still running")
        os._exit(1)  # nothing can interrupt the thread
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    log.info("stopped")
    if server.has_failed:
        sys.exit(1)


def _end(reason: str) -> None:
    """End the process, so that its supervisor can restart it. Requests continue elsewhere in the meantime."""
    log.error("%s; the process ends", reason)
    os._exit(1)
