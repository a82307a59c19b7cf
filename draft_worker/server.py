"""The draft worker's process: settings, model and server."""

from functools import partial

from pydantic import Field

from draft_worker.proposer import Proposer
from draft_worker.service import DraftWorkerServicer
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.startup.loading import load_engine
from specpool.engine.startup.node import run_node
from specpool.v1 import draft_worker_pb2_grpc as pb_grpc
from specpool.worker.process import run_worker
from specpool.worker.settings import WorkerSettings

PROGRAM = "specpool-draft-worker"
SERVICE = "specpool.v1.DraftWorkerService"


class DraftWorkerSettings(WorkerSettings, EngineOptions):
    """Proposes draft tokens with a small model."""

    port: int = Field(50052, ge=0, le=65535, description="port to listen on; 0 lets the system choose")


def load_proposer(settings: DraftWorkerSettings) -> Proposer:
    """Builds the backend. Runs on the model thread."""
    # A draft may differ from batch to batch, since verification decides.
    return Proposer(load_engine(EngineOptions.of(settings), exact=False))


def main() -> None:
    """Entry point of `specpool-draft-worker`."""
    settings = DraftWorkerSettings.load(PROGRAM)
    if settings.node_rank > 0:
        run_node(PROGRAM, EngineOptions.of(settings))
    register = pb_grpc.add_DraftWorkerServiceServicer_to_server
    load = partial(load_proposer, settings)
    run_worker(PROGRAM, settings, load, SERVICE, register, DraftWorkerServicer, (UnsupportedModelError,))


if __name__ == "__main__":
    main()
