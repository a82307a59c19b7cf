"""The target worker's process: settings, model, server."""

import asyncio
import sys
from functools import partial

from pydantic import Field
from specpool.v1 import target_worker_pb2_grpc as pb_grpc

from engine.engine import Engine
from engine.loading import UnsupportedModelError
from engine.options import EngineOptions
from rpc.server import Server, configure_logging
from rpc.settings import ServerSettings
from rpc.worker_service import WorkerHost, serve_worker
from target_worker.service import TargetWorkerServicer
from target_worker.verifier import Verifier


class TargetWorkerSettings(ServerSettings, EngineOptions):
    """Verifies draft tokens with the target model."""

    port: int = Field(50051, ge=0, le=65535, description="port to listen on; 0 lets the system choose")
    lease_seconds: float = Field(
        60.0, gt=0, description="sequences of a coordinator that was silent for so long are freed"
    )


def load_verifier(settings: TargetWorkerSettings) -> Verifier:
    """Builds the backend; on the model thread."""
    options = EngineOptions(**settings.model_dump(include=set(EngineOptions.model_fields)))
    return Verifier(Engine.load(options, exact=True))


async def serve(settings: TargetWorkerSettings) -> None:
    """Serves until SIGTERM."""
    host = WorkerHost(partial(load_verifier, settings))
    servicer = TargetWorkerServicer(host)

    def add_services(server: Server) -> None:
        server.add("specpool.v1.TargetWorkerService", pb_grpc.add_TargetWorkerServiceServicer_to_server, servicer)

    await serve_worker(settings, settings.lease_seconds, host, add_services)


def main() -> None:
    """Entry point of `specpool-target-worker`."""
    settings = TargetWorkerSettings.load("specpool-target-worker")
    configure_logging(settings.log_level)
    settings.log_resolved()
    try:
        asyncio.run(serve(settings))
    except (UnsupportedModelError, OSError) as error:
        sys.exit(f"specpool-target-worker: {error}")


if __name__ == "__main__":
    main()
