"""The coordinator process: loads settings, and runs the coordinator and its gRPC server."""

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import Callable

from coordinator.config.settings import CoordinatorSettings
from coordinator.metrics import CoordinatorMetrics
from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.serving.coordinator import Coordinator
from coordinator.serving.intake import Intake
from coordinator.serving.service import GenerationServicer
from coordinator.workers.interface import MismatchError, UnusableModelError
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging, end_process
from specpool.rpc.observability.otlp_metrics import request_meter
from specpool.rpc.observability.tracing import tracer_of
from specpool.rpc.ports import ListenError
from specpool.rpc.server.server import Server
from specpool.v1 import generation_pb2_grpc as pb_grpc

PROGRAM = "specpool-coordinator"
# Time for the workers to release all slots at shutdown.
RELEASE_SECONDS = 2.0
# Time for a lost target worker to come back during a drain.
TARGET_AWAY_SECONDS = 5.0
AWAY_CHECK_SECONDS = 0.1

# Calls leave no reference cycles; with thousands open, a full collection pauses them all noticeably.
COLLECTIONS_PER_FULL_COLLECTION = 100

log = logging.getLogger("coordinator.server")  # also if run as __main__


class CoordinatorServer:
    """A coordinator and its server. Call `start`, then `wait_stopped`."""

    def __init__(self, settings: CoordinatorSettings, new_pool: Callable[[int], TokenizerPool] = TokenizerPool) -> None:
        """`new_pool`: see `Coordinator`."""
        self._tracer = tracer_of(settings, PROGRAM)
        self._meter = request_meter(settings.otlp_metrics_endpoint, PROGRAM)
        self.coordinator = Coordinator(settings, self._tracer, new_pool)
        self.target_away_seconds = min(TARGET_AWAY_SECONDS, settings.drain_seconds)
        self.server = Server(settings, settings.max_request_bytes)
        intake = Intake(self.coordinator, self.server, self._meter)
        servicer = GenerationServicer(self.coordinator, self.server, intake)
        self.server.add("specpool.v1.GenerationService", pb_grpc.add_GenerationServiceServicer_to_server, servicer)
        self.server.registry.register(CoordinatorMetrics(self.coordinator))
        if settings.smg:
            from coordinator.smg.service import add_engine_service  # needs the extra `smg`

            add_engine_service(self.coordinator, self.server, intake)
        self.coordinator.lanes.on_change = lambda: self.server.set_serving(self.coordinator.lanes.is_ready)
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen and connect to the workers. Return the port."""
        port = await self.server.start()
        self.coordinator.tokenizers.start()
        if self.coordinator.recorder is not None:
            self.coordinator.recorder.start()
        self._running = asyncio.create_task(self.coordinator.run())
        self._running.add_done_callback(lambda _: self.server.stop(drain=False))  # it can no longer serve calls
        return port

    async def wait_stopped(self) -> None:
        """Serve until the server has stopped and drained. Raises the error of a failed coordinator."""
        assert self._running is not None
        waiting = asyncio.create_task(self._end_drain_without_target())
        await self.server.wait_stopped()
        waiting.cancel()
        self.coordinator.auditor.stop()
        failed = self._running.done() and not self._running.cancelled()
        if not failed and self.coordinator.lanes.is_ready:
            # Cancelled requests hold slots that the next coordinator needs.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_SECONDS):
                    await self.coordinator.slots_released()
        self._running.cancel()
        try:
            await asyncio.gather(self._running, return_exceptions=not failed)
        finally:
            await self.coordinator.close()
            await asyncio.gather(
                *(exporter.close() for exporter in (self._tracer, self._meter) if exporter is not None)
            )

    async def _end_drain_without_target(self) -> None:
        """Cut a drain short once all target workers have been away for some seconds."""
        lanes = self.coordinator.lanes
        await self.server.wait_stopping()
        while True:
            try:
                async with asyncio.timeout(self.target_away_seconds):
                    await lanes.wait_ready()
            except TimeoutError:
                log.warning("target worker unreachable; failing requests in progress")
                return self.server.stop(drain=False)
            await asyncio.sleep(AWAY_CHECK_SECONDS)


async def serve(settings: CoordinatorSettings) -> None:
    process = CoordinatorServer(settings)
    process.server.stop_on_signals()  # first, so that an early signal stops cleanly too
    await process.start()
    await process.wait_stopped()
    log.info("stopped")
    if process.server.has_failed:
        sys.exit(1)


def main() -> None:
    settings = CoordinatorSettings.load(PROGRAM)
    configure_logging(settings.log_level, settings.log_format, PROGRAM)
    settings.log_resolved()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], COLLECTIONS_PER_FULL_COLLECTION)
    try:
        with naming(PROGRAM, "", ListenError, UnusableModelError):
            asyncio.run(serve(settings))
    except (OSError, MismatchError) as error:
        end_process(f"{PROGRAM}: {error}", 1)


if __name__ == "__main__":
    main()
