"""The link to the draft worker."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import grpc

from coordinator.workers import link
from coordinator.workers.interface import Cause, MismatchError, Target, WorkerRefusedError
from coordinator.workers.link import WorkerLink, shortened, status_text, timed
from coordinator.workers.states import Backoff, LinkState
from coordinator.workers.streams import RoundCalls
from specpool.drafting.costs import UNKNOWN_DRAFT, Timed
from specpool.drafting.draft_models import DraftModel
from specpool.protocol.codec import propose_request, use_tokenizer_request
from specpool.protocol.responses import (
    InvalidResponseError,
    decoded,
    max_propose_bytes,
    read_proposals,
    read_translation,
)
from specpool.protocol.rounds import Proposal, ProposeItem
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import TranslationInfo, WorkerInfo, why_not_a_pair
from specpool.rpc.security.channel import Connector
from specpool.rpc.status import ANSWERED
from specpool.v1 import draft_worker_pb2_grpc

log = logging.getLogger(__name__)

# Backoff of a flapping draft worker: maximum pause, and uptime that resets it, as a multiple of the last pause.
MAX_BACKOFF_SECONDS, RESET_AFTER = 30.0, 10
# Timeout of a round, as a multiple of its expected duration, and its minimum.
TIMEOUT_FACTOR, MIN_TIMEOUT_SECONDS = 20, 1.0
# Workers need one or two seconds for the largest tokenizers.
TRANSLATION_TIMEOUT_SECONDS = 60.0
# Rounds before the expected duration is reliable: the first ones compile kernels and fill caches.
WARMUP_ROUNDS = 8


class DraftLink(WorkerLink):
    """The draft worker. After a timeout or an error it backs off, longer each time."""

    role = "draft"
    _unknown_times = UNKNOWN_DRAFT
    model: DraftModel | None
    """The worker's draft model. None until the worker has been ready."""

    def __init__(
        self, connector: Connector, coordinator_id: str, timeout_seconds: float, target: Target, label: str = ""
    ) -> None:
        """`label`: the operator's name for the worker's draft."""
        super().__init__(connector, coordinator_id, timeout_seconds)
        self.label, self.model = label, None
        self._target = target
        self._rounds_served = 0
        """Rounds since the worker was last unavailable."""
        self._translation_id = ""
        """Id of the worker's translation of the target's tokens. Empty if the tokenizers are equal."""
        self._refused: tuple[tuple[str, str], TranslationInfo] | None = None
        """Worker process, fingerprint of a tokenizer that it cannot translate, and its answer."""

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return draft_worker_pb2_grpc.DraftWorkerServiceStub(channel)

    def _make_rounds(self) -> RoundCalls:
        return RoundCalls(self._stub.ProposeStream, self._timeout, self._check_instance)

    def _make_backoff(self) -> Backoff:
        return Backoff(link.PROBE_SECONDS, 2 * link.PROBE_SECONDS, MAX_BACKOFF_SECONDS, RESET_AFTER)

    async def _read_description(self) -> None:
        if self._target.info is None:
            self._set_state(LinkState.CONNECTING, "waiting for the target", logging.DEBUG)
            await self._target.wait_ready()  # then read a fresh description
        await super()._read_description()

    async def _checked(self, info: WorkerInfo) -> WorkerInfo:
        target, files = self._target.info, self._target.tokenizer_files
        assert target is not None
        differs = info.tokenizer_fingerprint != target.tokenizer_fingerprint
        check_pair(info, target, translates=files is not None)
        self._translation_id = ""
        if not differs or files is None:
            return info
        found = await self._use_tokenizer(info, files, target.vocab_size)
        if found.refusal:
            reason = f"the draft {info.model} uses a different tokenizer than the target {target.model}"
            raise MismatchError(f"{reason}, which its worker cannot translate: {shortened(found.refusal)}")
        self._translation_id = found.translation_id
        share = f"{100 * found.vocabulary_coverage:.0f}% of the target's vocabulary"
        note = f"translates tokens ({found.method}): the draft has {share}"
        log.info("the draft worker at %s %s", self.address, note)
        return replace(
            info,
            vocab_size=target.vocab_size,
            max_branches=0,
            notes=(*info.notes, note),
            tokenizer_translation=found.method,
            vocabulary_coverage=found.vocabulary_coverage,
        )

    async def _use_tokenizer(self, info: WorkerInfo, files: TokenizerFiles, vocab_size: int) -> TranslationInfo:
        """Send the target's tokenizer to the worker, unless the same process has refused it before."""
        key = info.instance_id, files.fingerprint
        if self._refused is not None and self._refused[0] == key:
            return self._refused[1]
        request = use_tokenizer_request(self._coordinator_id, files, vocab_size)
        try:
            response = await self._stub.UseTokenizer(request, timeout=TRANSLATION_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            if ANSWERED in (error.trailing_metadata() or ()):
                raise WorkerRefusedError(status_text(error)) from None  # a retry may succeed
            # Older workers lack the method, and gRPC rejects requests above the worker's message limit.
            if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise
            found = TranslationInfo("", "", 0.0, status_text(error))
        else:
            found = read_translation(decoded(response, "translation"), info.instance_id)
        self._refused = (key, found) if found.refusal else None
        return found

    def _back_off(self, reason: str) -> None:
        self._rounds_served = 0
        super()._back_off(reason)

    async def propose(
        self,
        round_id: int,
        items: list[ProposeItem],
        chances: Iterable[float] = (),
        step_cost: float = 0.0,
        traceparent: str = "",
    ) -> tuple[list[Proposal], Timed]:
        """Run a draft round. Raises WorkerUnreachableError, WorkerRefusedError.

        `chances`: acceptance probabilities for draft probabilities from 0 to 1 in equal steps. `step_cost`: minimum
        expected gain of a draft step, in tokens. `traceparent`: parent span.
        """
        hints = chances, step_cost, traceparent, self._translation_id
        request = propose_request(self._coordinator_id, round_id, items, *hints)
        try:
            response, elapsed = await self._round(request, lambda: max_propose_bytes(items), self._timeout_of(items))
            proposals = read_proposals(response, round_id, items)
        except WorkerRefusedError as error:
            self._back_off(str(error))
            raise
        except InvalidResponseError as error:
            raise self._lost(str(error), Cause.FAILED) from None
        self._backoff.succeeded()
        self._rounds_served += 1
        return proposals, timed(elapsed, response)

    def _timeout_of(self, items: list[ProposeItem]) -> float:
        """Return the timeout of a round in seconds, shorter once its duration can be estimated."""
        if self._rounds_served < WARMUP_ROUNDS:
            return self._timeout
        return min(self._timeout, max(MIN_TIMEOUT_SECONDS, TIMEOUT_FACTOR * self._expected_seconds(items)))

    def _expected_seconds(self, items: list[ProposeItem]) -> float:
        num_steps = max(item.num_draft_tokens for item in items)
        steps = [
            sum(max(1, item.num_branches) for item in items if item.num_draft_tokens > step)
            for step in range(not any(item.num_branches for item in items), num_steps)
        ]
        return sum(map(self.step_times, [sum(item.max_num_new_tokens for item in items), *steps]))


def check_pair(draft: WorkerInfo, target: WorkerInfo, *, translates: bool = False) -> None:
    """Raise MismatchError unless the draft can draft for the target. `translates`: see `why_not_a_pair`."""
    if (reason := why_not_a_pair(draft, target, translates=translates)) is not None:
        raise MismatchError(reason)
