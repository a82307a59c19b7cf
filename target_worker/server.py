"""The target worker's process: settings, model and server.

torch and transformers take seconds to import, so they are imported on the model thread, while the server is up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.config.target_options import TargetOptions
from specpool.engine.models.preflight import InvalidOptionError, check_target
from specpool.protocol.codec import (
    read_chances,
    read_step_cost,
    read_verify_items,
    tokenizer_response,
    verify_response,
)
from specpool.protocol.prefixes import MAX_EVICTED_PAGES
from specpool.protocol.rounds import Verdict, VerifyRound
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging
from specpool.v1 import target_worker_pb2 as pb
from specpool.v1 import target_worker_pb2_grpc as pb_grpc
from specpool.worker.process import importing, run_worker
from specpool.worker.round_merging import Work
from specpool.worker.servicer import WorkerServicer
from specpool.worker.settings import WorkerSettings
from specpool.worker.streams import MAX_ROUNDS_AHEAD

if TYPE_CHECKING:
    from target_worker.verifier import Verifier

PROGRAM = "specpool-target-worker"
SERVICE = "specpool.v1.TargetWorkerService"


class Served(NamedTuple):
    """The result of a round."""

    verdicts: list[Verdict]
    evicted_pages: list[bytes]
    """Digests of evicted pages not yet reported to the round's coordinator."""
    draft_rows: Sequence[int]
    """Tokens run by each pass of the carried draft."""


class TargetWorkerServicer(WorkerServicer, pb_grpc.TargetWorkerServiceServicer):
    method = "Verify"
    max_rounds_ahead = MAX_ROUNDS_AHEAD

    @staticmethod
    def read(request: pb.VerifyRequest, verifier: Verifier) -> VerifyRound:
        items = read_verify_items(request, verifier.limits)
        features = tuple(request.feature_layers), request.feature_window
        hints = read_chances(request), read_step_cost(request)
        return VerifyRound(request.coordinator_id, request.round_id, items, request.may_join, *features, *hints)

    @staticmethod
    def serve(rounds: Sequence[VerifyRound], verifier: Verifier) -> list[Served]:
        """Verify rounds in one forward pass, and draft for the next ones."""
        verdicts, draft_rows = verifier.verify(rounds), verifier.draft_rows
        evicted = [verifier.take_evicted(round_.coordinator_id, MAX_EVICTED_PAGES) for round_ in rounds]
        return [Served(*each, draft_rows) for each in zip(verdicts, evicted, strict=True)]

    @staticmethod
    def respond(round_id: int, served: Served, spent: Mapping[str, int], instance_id: str) -> pb.VerifyResponse:
        """Build the response to a round."""
        return verify_response(round_id, served.verdicts, spent, instance_id, served.evicted_pages, served.draft_rows)

    @staticmethod
    def work(round_: VerifyRound, verifier: Verifier) -> Work:
        """Return the cost: one forward pass."""
        served = (item for item in round_.items if verifier.has_room(round_.coordinator_id, item.sequence_id))
        return Work(sum(item.max_num_new_tokens + item.max_num_draft_tokens for item in served))

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        """Realign, extend and verify one round."""
        response: pb.VerifyResponse = await self.round(request)
        return response

    async def VerifyStream(
        self, requests: AsyncIterator[pb.VerifyRequest], context: Any
    ) -> AsyncIterator[pb.VerifyResponse]:
        async for response in self.rounds(requests, context):
            yield response

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        return tokenizer_response(self._host.backend.tokenizer(), self._host.instance_id)


class TargetWorkerSettings(WorkerSettings, TargetOptions):
    """Verifies draft tokens with the target model, and may carry a draft model that drafts them."""

    port: int = Field(50051, ge=0, le=65535, description="port to listen on; 0 lets the system choose")


def load_verifier(settings: TargetWorkerSettings, report: Callable[[str], None]) -> Verifier:
    """Build the backend, and report the phases. Runs on the model thread."""
    with importing(report):
        from draft_worker.proposer import Proposer
        from target_worker.loading import load_pair, load_target
        from target_worker.verifier import Verifier

    options = TargetOptions.of(settings)
    if options.draft is None:
        return Verifier(load_target(options, settings.startup_cache, report))
    target, draft = load_pair(options, settings.startup_cache, report)
    return Verifier(target, Proposer(draft))


def main() -> None:
    settings = TargetWorkerSettings.load(PROGRAM)
    options = EngineOptions.of(settings)
    configure_logging(settings.log_level, settings.log_format, settings.log_name or PROGRAM)
    with naming(PROGRAM, "", InvalidOptionError):
        check_target(TargetOptions.of(settings))
    if settings.node_rank > 0:
        from specpool.engine.startup.follower import run_node

        run_node(PROGRAM, options)
    register = pb_grpc.add_TargetWorkerServiceServicer_to_server
    load = partial(load_verifier, settings)
    run_worker(PROGRAM, settings, load, SERVICE, register, TargetWorkerServicer, (UnsupportedModelError,))


if __name__ == "__main__":
    main()
