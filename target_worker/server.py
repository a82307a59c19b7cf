"""The target worker's process: settings, model and server.

torch and transformers take seconds to import, so they are imported on the model thread, while the server is up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.preflight import InvalidOptionError, check_options
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging
from specpool.v1 import target_worker_pb2_grpc as pb_grpc
from specpool.worker.process import importing, run_worker
from specpool.worker.settings import WorkerSettings
from target_worker.service import TargetWorkerServicer

if TYPE_CHECKING:
    from target_worker.verifier import Verifier

PROGRAM = "specpool-target-worker"
SERVICE = "specpool.v1.TargetWorkerService"


class TargetWorkerSettings(WorkerSettings, EngineOptions):
    """Verifies draft tokens with the target model."""

    port: int = Field(50051, ge=0, le=65535, description="port to listen on; 0 lets the system choose")


def load_verifier(settings: TargetWorkerSettings, report: Callable[[str], None]) -> Verifier:
    """Build the backend, and report the phases. Runs on the model thread."""
    with importing(report):
        from specpool.engine.startup.loading import load_engine
        from target_worker.verifier import Verifier

    engine = load_engine(EngineOptions.of(settings), exact=True, startup_cache=settings.startup_cache, report=report)
    if engine.loaded.features is not None:
        raise UnsupportedModelError(f"{settings.model} is a draft that reads hidden states, not a target")
    return Verifier(engine)


def main() -> None:
    """Entry point of `specpool-target-worker`."""
    settings = TargetWorkerSettings.load(PROGRAM)
    options = EngineOptions.of(settings)
    configure_logging(settings.log_level, settings.log_format, settings.log_name or PROGRAM)
    with naming(PROGRAM, "", InvalidOptionError):
        check_options(options)
    if settings.node_rank > 0:
        from specpool.engine.startup.follower import run_node

        run_node(PROGRAM, options)
    register = pb_grpc.add_TargetWorkerServiceServicer_to_server
    load = partial(load_verifier, settings)
    run_worker(PROGRAM, settings, load, SERVICE, register, TargetWorkerServicer, (UnsupportedModelError,))


if __name__ == "__main__":
    main()
