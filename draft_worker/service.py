"""The draft worker's RPCs: protobuf in, protobuf out, and the proposer in between."""

import math
from collections.abc import AsyncIterator
from typing import Any

from draft_worker.proposer import Proposal, ProposeItem, Proposer
from engine.sampling import SamplingParams
from rpc.errors import InvalidArgumentError
from specpool.v1 import draft_worker_pb2 as pb
from specpool.v1 import draft_worker_pb2_grpc
from worker.service import (
    RoundLimits,
    WorkerServicer,
    check_item,
    extension_fields,
    require_coordinator,
    round_limits,
    timed,
    wire_status,
)


class DraftWorkerServicer(WorkerServicer, draft_worker_pb2_grpc.DraftWorkerServiceServicer):
    """`specpool.v1.DraftWorkerService`."""

    async def Propose(self, request: pb.ProposeRequest, context: Any) -> pb.ProposeResponse:
        """Realigns, extends and drafts one round."""
        require_coordinator(request.coordinator_id)

        def propose(proposer: Proposer) -> tuple[list[Proposal], dict[str, int]]:
            items = _items(request, round_limits(proposer, request.coordinator_id))
            hints = request.chances, _in_range("step_cost", request.step_cost, most=math.inf)
            return timed(proposer, lambda: proposer.propose(request.coordinator_id, request.round_id, items, *hints))

        proposals, spent = await self._host.run(propose, request.coordinator_id)
        results = [
            pb.ProposeResult(
                sequence_id=item.sequence_id,
                status=wire_status(proposal.realignment),
                draft_token_ids=proposal.token_ids,
                cached_length=proposal.cached_length,
                confidences=proposal.confidences,
            )
            for item, proposal in zip(request.items, proposals, strict=True)
        ]
        return pb.ProposeResponse(round_id=request.round_id, results=results, **spent)

    async def ProposeStream(
        self, requests: AsyncIterator[pb.ProposeRequest], context: Any
    ) -> AsyncIterator[pb.ProposeResponse]:
        """Round after round."""
        async for response in self._host.each(requests, lambda request: self.Propose(request, context)):
            yield response


def _in_range(field: str, value: float, most: float = 1.0) -> float:
    if not 0 <= value <= most:
        raise InvalidArgumentError(field, f"{value:g} is not from 0 to {most:g}")
    return value


def _items(request: pb.ProposeRequest, limits: RoundLimits) -> list[ProposeItem]:
    seen: set[int] = set()
    for index, item in enumerate(request.items):
        check_item(index, item, limits, max(0, item.num_draft_tokens - 1), seen)
        for name in ("min_chance", "next_chance"):
            _in_range(f"items[{index}].{name}", getattr(item, name))
    return [
        ProposeItem(
            **extension_fields(item, index, SamplingParams),
            num_draft_tokens=item.num_draft_tokens,
            min_chance=item.min_chance,
            next_chance=item.next_chance if item.HasField("next_chance") else 1.0,
        )
        for index, item in enumerate(request.items)
    ]
