"""The draft worker's RPCs: protobuf in, protobuf out, and the proposer in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from specpool.protocol.codec import propose_response, read_chances, read_propose_items, read_step_cost
from specpool.protocol.rounds import Proposal
from specpool.v1 import draft_worker_pb2 as pb
from specpool.v1 import draft_worker_pb2_grpc
from specpool.worker.servicer import WorkerServicer

if TYPE_CHECKING:
    from draft_worker.proposer import Proposer


class DraftWorkerServicer(WorkerServicer, draft_worker_pb2_grpc.DraftWorkerServiceServicer):
    """Servicer of `specpool.v1.DraftWorkerService`."""

    method = "Propose"
    respond = staticmethod(propose_response)

    @staticmethod
    def serve(request: pb.ProposeRequest, proposer: Proposer) -> list[Proposal]:
        """Drafts one round."""
        items = read_propose_items(request, proposer.limits(request.coordinator_id))
        hints = read_chances(request), read_step_cost(request)
        return proposer.propose(request.coordinator_id, request.round_id, items, *hints)

    async def Propose(self, request: pb.ProposeRequest, context: Any) -> pb.ProposeResponse:
        """Realigns, extends and drafts one round."""
        response: pb.ProposeResponse = await self.round(request)
        return response

    async def ProposeStream(
        self, requests: AsyncIterator[pb.ProposeRequest], context: Any
    ) -> AsyncIterator[pb.ProposeResponse]:
        """Answers a stream of rounds."""
        async for response in self.rounds(requests, context):
            yield response
