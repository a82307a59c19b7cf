"""The draft worker's RPCs: protobuf in, protobuf out, and the proposer in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from specpool.protocol.codec import propose_response, read_chances, read_propose_items, read_step_cost
from specpool.protocol.rounds import Proposal, ProposeRound
from specpool.v1 import draft_worker_pb2 as pb
from specpool.v1 import draft_worker_pb2_grpc
from specpool.worker.round_merging import Work
from specpool.worker.servicer import WorkerServicer

if TYPE_CHECKING:
    from draft_worker.proposer import Proposer


class DraftWorkerServicer(WorkerServicer, draft_worker_pb2_grpc.DraftWorkerServiceServicer):
    """Servicer of `specpool.v1.DraftWorkerService`."""

    method = "Propose"
    respond = staticmethod(propose_response)

    @staticmethod
    def read(request: pb.ProposeRequest, proposer: Proposer) -> ProposeRound:
        items = read_propose_items(request, proposer.limits)
        hints = read_chances(request), read_step_cost(request)
        return ProposeRound(request.coordinator_id, request.round_id, items, *hints)

    @staticmethod
    def serve(rounds: Sequence[ProposeRound], proposer: Proposer) -> list[list[Proposal]]:
        """Draft for rounds of different coordinators."""
        return proposer.propose(rounds)

    @staticmethod
    def work(round_: ProposeRound, proposer: Proposer) -> Work:
        """Return the cost: a forward pass per draft token, and one more for branches."""
        served = [item for item in round_.items if proposer.has_room(round_.coordinator_id, item.sequence_id)]
        return Work(
            sum(max(len(item.token_ids), item.num_branches) for item in served),
            max((item.num_draft_tokens + (item.num_branches > 0) for item in served), default=1),
        )

    async def Propose(self, request: pb.ProposeRequest, context: Any) -> pb.ProposeResponse:
        """Realign, extend and draft one round."""
        response: pb.ProposeResponse = await self.round(request)
        return response

    async def ProposeStream(
        self, requests: AsyncIterator[pb.ProposeRequest], context: Any
    ) -> AsyncIterator[pb.ProposeResponse]:
        """Answer a stream of rounds."""
        async for response in self.rounds(requests, context):
            yield response
