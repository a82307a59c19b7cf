"""The draft worker's process: settings, model, server."""

import asyncio
import sys
from functools import partial

from pydantic import Field
from specpool.v1 import draft_worker_pb2_grpc as pb_grpc

from draft_worker.proposer import Proposer
from draft_worker.service import DraftWorkerServicer
from engine.engine import Engine
from engine.loading import UnsupportedModelError
from engine.options import EngineOptions
from rpc.server import Server, configure_logging
from rpc.settings import ServerSettings
from rpc.worker_service import WorkerHost, serve_worker


class DraftWorkerSettings(ServerSettings, EngineOptions):
    """Proposes draft tokens with a small model."""

    port: int = Field(50052, ge=0, le=65535, description="port to listen on; 0 lets the system choose")
    lease_seconds: float = Field(
        60.0, gt=0, description="sequences of a coordinator that was silent for so long are freed"
    )


def load_proposer(settings: DraftWorkerSettings) -> Proposer:
    """Builds the backend; on the model thread."""
    # A draft may differ from batch to batch: verification decides.
    options = EngineOptions(**settings.model_dump(include=set(EngineOptions.model_fields)))
    return Proposer(Engine.load(options, exact=False))


async def serve(settings: DraftWorkerSettings) -> None:
    """Serves until SIGTERM."""
    host = WorkerHost(partial(load_proposer, settings))
    servicer = DraftWorkerServicer(host)

    def add_services(server: Server) -> None:
        server.add("specpool.v1.DraftWorkerService", pb_grpc.add_DraftWorkerServiceServicer_to_server, servicer)

    await serve_worker(settings, settings.lease_seconds, host, add_services)


def main() -> None:
    """Entry point of `specpool-draft-worker`."""
    settings = DraftWorkerSettings.load("specpool-draft-worker")
    configure_logging(settings.log_level)
    settings.log_resolved()
    try:
        asyncio.run(serve(settings))
    except (UnsupportedModelError, OSError) as error:
        sys.exit(f"specpool-draft-worker: {error}")


if __name__ == "__main__":
    main()
