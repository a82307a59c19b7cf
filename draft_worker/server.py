"""The draft worker's process: settings, model and server.

torch and transformers take seconds to import, so they are imported on the model thread, while the server is up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.preflight import InvalidOptionError, check_options
from specpool.protocol.codec import (
    propose_response,
    read_chances,
    read_propose_items,
    read_step_cost,
    read_use_tokenizer,
)
from specpool.protocol.rounds import Proposal, ProposeRound
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging
from specpool.v1 import draft_worker_pb2 as pb
from specpool.v1 import draft_worker_pb2_grpc as pb_grpc
from specpool.worker.process import importing, run_worker
from specpool.worker.round_merging import Work
from specpool.worker.servicer import WorkerServicer
from specpool.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from draft_worker.translating import TranslatingProposer
    from draft_worker.translation.translations import Translations

PROGRAM = "specpool-draft-worker"
SERVICE = "specpool.v1.DraftWorkerService"


class DraftWorkerServicer(WorkerServicer, pb_grpc.DraftWorkerServiceServicer):
    method = "Propose"
    respond = staticmethod(propose_response)

    @staticmethod
    def read(request: pb.ProposeRequest, proposer: TranslatingProposer) -> ProposeRound:
        translation_id = request.translation_id
        items = read_propose_items(request, proposer.limits_of(translation_id))
        hints = read_chances(request), read_step_cost(request)
        return ProposeRound(request.coordinator_id, request.round_id, items, *hints, translation_id)

    @staticmethod
    def serve(rounds: Sequence[ProposeRound], proposer: TranslatingProposer) -> list[list[Proposal]]:
        """Draft for rounds of different coordinators."""
        return proposer.serve(rounds)

    @staticmethod
    def work(round_: ProposeRound, proposer: TranslatingProposer) -> Work:
        """Return the cost: a forward pass per draft token, and one more for branches."""
        served = [item for item in round_.items if proposer.has_room(round_.coordinator_id, item.sequence_id)]
        return Work(
            sum(max(item.max_num_new_tokens, item.num_branches) for item in served),
            max((item.num_draft_tokens + (item.num_branches > 0) for item in served), default=1),
        )

    async def Propose(self, request: pb.ProposeRequest, context: Any) -> pb.ProposeResponse:
        """Realign, extend and draft one round."""
        response: pb.ProposeResponse = await self.round(request)
        return response

    async def ProposeStream(
        self, requests: AsyncIterator[pb.ProposeRequest], context: Any
    ) -> AsyncIterator[pb.ProposeResponse]:
        async for response in self.rounds(requests, context):
            yield response

    async def UseTokenizer(self, request: pb.UseTokenizerRequest, context: Any) -> pb.UseTokenizerResponse:
        """Prepare the translation between the target's tokens and the draft's."""
        files, vocab_size = read_use_tokenizer(request)
        translations: Translations = self._host.backend.translations
        translation_id, found = await translations.use(files, vocab_size)
        response = pb.UseTokenizerResponse(instance_id=self._host.instance_id)
        if isinstance(found, str):
            response.refusal = found
        else:
            response.translation_id, response.method = translation_id, found.method
            response.vocabulary_coverage = found.coverage
        return response


class DraftWorkerSettings(WorkerSettings, EngineOptions):
    """Proposes draft tokens with a small model."""

    port: int = Field(50052, ge=0, le=65535, description="port to listen on; 0 lets the system choose")


def load_proposer(settings: DraftWorkerSettings, report: Callable[[str], None]) -> TranslatingProposer:
    """Build the backend, and report the phases. Runs on the model thread."""
    with importing(report):
        from draft_worker.translating import TranslatingProposer
        from specpool.engine.startup.loading import load_engine

    # Drafts need not be batch-invariant: verification decides.
    engine = load_engine(EngineOptions.of(settings), exact=False, startup_cache=settings.startup_cache, report=report)
    return TranslatingProposer(engine)


def main() -> None:
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
