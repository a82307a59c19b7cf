"""The draft worker's process: settings, model and server.

torch and transformers take seconds to import, so they are imported on the model thread, while the server is up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field

from draft_worker.service import DraftWorkerServicer
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.preflight import InvalidOptionError, check_options
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging
from specpool.v1 import draft_worker_pb2_grpc as pb_grpc
from specpool.worker.process import importing, run_worker
from specpool.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from draft_worker.proposer import Proposer

PROGRAM = "specpool-draft-worker"
SERVICE = "specpool.v1.DraftWorkerService"


class DraftWorkerSettings(WorkerSettings, EngineOptions):
    """Proposes draft tokens with a small model."""

    port: int = Field(50052, ge=0, le=65535, description="port to listen on; 0 lets the system choose")


def load_proposer(settings: DraftWorkerSettings, report: Callable[[str], None]) -> Proposer:
    """Build the backend, and report the phases. Runs on the model thread."""
    with importing(report):
        from draft_worker.proposer import Proposer
        from specpool.engine.startup.loading import load_engine

    # Drafts need not be batch-invariant: verification decides.
    engine = load_engine(EngineOptions.of(settings), exact=False, startup_cache=settings.startup_cache, report=report)
    return Proposer(engine)


def main() -> None:
    """Entry point of `specpool-draft-worker`."""
    settings = DraftWorkerSettings.load(PROGRAM)
    options = EngineOptions.of(settings)
    configure_logging(settings.log_level, settings.log_format, settings.log_name or PROGRAM)
    with naming(PROGRAM, "", InvalidOptionError):
        check_options(options)
    if settings.node_rank > 0:
        from specpool.engine.startup.follower import run_node

        run_node(PROGRAM, options)
    register = pb_grpc.add_DraftWorkerServiceServicer_to_server
    load = partial(load_proposer, settings)
    run_worker(PROGRAM, settings, load, SERVICE, register, DraftWorkerServicer, (UnsupportedModelError,))


if __name__ == "__main__":
    main()
