"""The link to the draft worker."""

from collections.abc import Iterable
from typing import Any

import grpc

from coordinator.counters import Timed
from coordinator.drafting.costs import UNKNOWN_DRAFT
from coordinator.workers import link
from coordinator.workers.link import (
    LONGEST_REST_SECONDS,
    LinkState,
    MismatchError,
    WorkerLink,
    WorkerRefusedError,
    timed,
)
from coordinator.workers.streams import RoundCalls
from coordinator.workers.target_link import TargetLink
from protocol.codec import MisfitError, propose_request, read_proposals
from protocol.rounds import Proposal, ProposeItem
from rpc.channel import Connector
from specpool.v1 import common_pb2, draft_worker_pb2_grpc


class DraftLink(WorkerLink):
    """The draft worker. After it was too slow or refused a round it rests for a while, longer each time."""

    _unknown_times = UNKNOWN_DRAFT

    def __init__(self, connector: Connector, coordinator_id: str, timeout_seconds: float, target: TargetLink) -> None:
        super().__init__(connector, coordinator_id, timeout_seconds)
        self._target = target

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return draft_worker_pb2_grpc.DraftWorkerServiceStub(channel)

    def _make_rounds(self) -> RoundCalls:
        return RoundCalls(self._stub.ProposeStream, self._stub.Propose, self._timeout)

    async def _probe(self) -> None:
        if self._target.info is None:
            self._set_state(LinkState.CONNECTING, "waiting for the target")
            await self._target.wait_ready()  # before the draft is asked: its answer would be old
        await super()._probe()

    async def _check(self, info: common_pb2.ModelInfo) -> None:
        target = self._target.info
        assert target is not None
        if info.tokenizer_fingerprint != target.tokenizer_fingerprint:
            raise MismatchError(f"the draft {info.model} has another tokenizer than the target {target.model}")

    def _lost(self, code: grpc.StatusCode, reason: str) -> None:
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._rest(reason)
        else:
            super()._lost(code, reason)

    def _rest(self, reason: str) -> None:
        self._rest_seconds = min(LONGEST_REST_SECONDS, max(link.PROBE_SECONDS, 2 * self._rest_seconds))
        self._set_state(LinkState.RESTING, reason)
        self._probe_now.set()

    async def propose(
        self, round_id: int, items: list[ProposeItem], chances: Iterable[float] = (), step_cost: float = 0.0
    ) -> tuple[list[Proposal], Timed]:
        """Runs a round's proposals. `chances`: acceptance probabilities, for draft probabilities from 0 to 1 in equal
        steps. `step_cost`: the tokens that a draft step must gain.

        WorkerUnreachableError, WorkerRefusedError.
        """
        request = propose_request(self._coordinator_id, round_id, items, chances, step_cost)
        try:
            response, elapsed = await self._round(request)
        except WorkerRefusedError as error:
            self._rest(str(error))
            raise
        try:
            proposals = read_proposals(response, items)
        except MisfitError as error:
            self._rest(str(error))
            raise WorkerRefusedError(self.reason) from None
        self._rest_seconds = 0.0
        return proposals, timed(elapsed, response)
