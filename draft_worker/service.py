"""The draft worker's RPCs: protobuf in, protobuf out, and the proposer in between."""

from collections.abc import AsyncIterator
from typing import Any

from draft_worker.proposer import Proposer
from specpool.protocol.codec import (
    propose_response,
    read_chances,
    read_propose_items,
    read_step_cost,
    require_coordinator,
)
from specpool.protocol.rounds import Proposal
from specpool.rpc.server.callers import client_of
from specpool.v1 import draft_worker_pb2 as pb
from specpool.v1 import draft_worker_pb2_grpc
from specpool.worker.servicer import WorkerServicer


class DraftWorkerServicer(WorkerServicer, draft_worker_pb2_grpc.DraftWorkerServiceServicer):
    """Servicer of `specpool.v1.DraftWorkerService`."""

    async def Propose(self, request: pb.ProposeRequest, context: Any) -> pb.ProposeResponse:
        """Realigns, extends and drafts one round."""
        response: pb.ProposeResponse = await self._traced("propose", request, self._propose)
        return response

    async def _propose(self, request: pb.ProposeRequest) -> pb.ProposeResponse:
        require_coordinator(request.coordinator_id)
        name = f"Propose (round {request.round_id}, {len(request.items)} sequences)"

        def propose(proposer: Proposer) -> tuple[list[Proposal], dict[str, int]]:
            items = read_propose_items(request, proposer.limits(request.coordinator_id))
            hints = read_chances(request), read_step_cost(request)
            return self._host.timed(
                proposer, lambda: proposer.propose(request.coordinator_id, request.round_id, items, *hints)
            )

        return propose_response(request.round_id, *await self._host.run(propose, request.coordinator_id, name))

    async def ProposeStream(
        self, requests: AsyncIterator[pb.ProposeRequest], context: Any
    ) -> AsyncIterator[pb.ProposeResponse]:
        """Answers a stream of rounds."""
        async for response in self._host.streams.each(
            requests, lambda request: self.Propose(request, context), client_of(context)
        ):
            yield response
