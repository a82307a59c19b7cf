"""The target worker's RPCs: protobuf in, protobuf out, and the verifier in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from specpool.protocol.codec import read_verify_items, tokenizer_response, verify_response
from specpool.protocol.rounds import Verdict, VerifyRound
from specpool.v1 import target_worker_pb2 as pb
from specpool.v1 import target_worker_pb2_grpc
from specpool.worker.round_merging import Work
from specpool.worker.servicer import WorkerServicer
from specpool.worker.streams import MAX_ROUNDS_AHEAD

if TYPE_CHECKING:
    from target_worker.verifier import Verifier


class TargetWorkerServicer(WorkerServicer, target_worker_pb2_grpc.TargetWorkerServiceServicer):
    """Servicer of `specpool.v1.TargetWorkerService`."""

    method = "Verify"
    max_rounds_ahead = MAX_ROUNDS_AHEAD
    respond = staticmethod(verify_response)

    @staticmethod
    def read(request: pb.VerifyRequest, verifier: Verifier) -> VerifyRound:
        items = read_verify_items(request, verifier.limits)
        features = tuple(request.feature_layers), request.feature_window
        return VerifyRound(request.coordinator_id, request.round_id, items, request.may_join, *features)

    @staticmethod
    def serve(rounds: Sequence[VerifyRound], verifier: Verifier) -> list[list[Verdict]]:
        """Verify rounds in one forward pass."""
        return verifier.verify(rounds)

    @staticmethod
    def work(round_: VerifyRound, verifier: Verifier) -> Work:
        """Return the cost: one forward pass."""
        served = (item for item in round_.items if verifier.has_room(round_.coordinator_id, item.sequence_id))
        return Work(sum(max(1, len(item.token_ids)) + item.max_num_draft_tokens for item in served))

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        """Realign, extend and verify one round."""
        response: pb.VerifyResponse = await self.round(request)
        return response

    async def VerifyStream(
        self, requests: AsyncIterator[pb.VerifyRequest], context: Any
    ) -> AsyncIterator[pb.VerifyResponse]:
        """Answer a stream of rounds."""
        async for response in self.rounds(requests, context):
            yield response

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        """Send the target's tokenizer."""
        return tokenizer_response(self._host.backend.tokenizer(), self._host.instance_id)
