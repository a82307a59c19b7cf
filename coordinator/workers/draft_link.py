"""The link to the draft worker."""

from collections.abc import Iterable
from typing import Any

import grpc

from coordinator.drafting.costs import UNKNOWN_DRAFT
from coordinator.scheduling.counters import Timed
from coordinator.workers import link
from coordinator.workers.breaker import Breaker
from coordinator.workers.errors import Cause, MismatchError, WorkerRefusedError
from coordinator.workers.interface import Target
from coordinator.workers.link import LinkState, WorkerLink, timed
from coordinator.workers.streams import RoundCalls
from specpool.protocol.answers import MisfitError, read_proposals
from specpool.protocol.codec import propose_request
from specpool.protocol.rounds import Proposal, ProposeItem
from specpool.rpc.security.channel import Connector
from specpool.v1 import common_pb2, draft_worker_pb2_grpc

# The longest rest of a draft that flaps, and how long it must have worked to be trusted again, as a multiple of a rest.
LONGEST_REST_SECONDS, FORGIVEN_AFTER = 30.0, 10
# A round may take this many times as long as expected, and at least this many seconds, before the draft is given up.
PATIENCE, LEAST_TIMEOUT_SECONDS = 20, 1.0
# Rounds after which the expected duration of a round is relied on: the first ones compile kernels and fill caches.
FIRST_ROUNDS = 8


class DraftLink(WorkerLink):
    """The draft worker. After it was too slow or refused a round it rests for a while, longer each time."""

    _unknown_times = UNKNOWN_DRAFT

    def __init__(self, connector: Connector, coordinator_id: str, timeout_seconds: float, target: Target) -> None:
        super().__init__(connector, coordinator_id, timeout_seconds)
        self._target = target
        self._served = 0
        """Rounds since the worker was away."""

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

    def _make_breaker(self) -> Breaker:
        return Breaker(LONGEST_REST_SECONDS, FORGIVEN_AFTER)

    def _rests(self) -> tuple[float, float]:
        return link.PROBE_SECONDS, 2 * link.PROBE_SECONDS

    def _rest(self, reason: str) -> None:
        self._served = 0
        super()._rest(reason)

    async def propose(
        self,
        round_id: int,
        items: list[ProposeItem],
        chances: Iterable[float] = (),
        step_cost: float = 0.0,
        traceparent: str = "",
    ) -> tuple[list[Proposal], Timed]:
        """Runs a round's proposals. `chances`: acceptance probabilities, for draft probabilities from 0 to 1 in equal
        steps. `step_cost`: the tokens that a draft step must gain. `traceparent`: the span that the call is part of.

        WorkerUnreachableError, WorkerRefusedError.
        """
        request = propose_request(self._coordinator_id, round_id, items, chances, step_cost, traceparent)
        try:
            response, elapsed = await self._round(request, self._timeout_of(items))
            proposals = read_proposals(response, round_id, items)
        except WorkerRefusedError as error:
            self._rest(str(error))
            raise
        except MisfitError as error:
            raise self._lost(str(error), Cause.FAILED) from None
        self._served += 1
        return proposals, timed(elapsed, response)

    def _timeout_of(self, items: list[ProposeItem]) -> float:
        """Seconds that a round may take: the longest allowed, or less where its cost is known."""
        if self._served < FIRST_ROUNDS:
            return self._timeout
        return min(self._timeout, max(LEAST_TIMEOUT_SECONDS, PATIENCE * self._expected(items)))

    def _expected(self, items: list[ProposeItem]) -> float:
        """Seconds that the passes of a round are expected to take."""
        longest = max(item.num_draft_tokens for item in items)
        steps = [sum(item.num_draft_tokens > step for item in items) for step in range(1, longest)]
        return sum(map(self.step_times, [sum(len(item.token_ids) for item in items), *steps]))
