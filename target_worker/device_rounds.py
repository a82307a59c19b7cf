"""Rounds that the device runs as a whole: verification, acceptance, and drafting for the next round.

All sequences of such a round decode greedily, and the draft is up to date with each sequence that it drafts for. The
caller runs any other round step by step.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache

from draft_worker.proposer import Proposer
from specpool.engine.cache.carried import CarriedDraft
from specpool.engine.cache.slots import SequenceKey, Slot
from specpool.engine.cache.spans import Span
from specpool.engine.run.device_round import DeviceRound, RoundSpan, SpanResult
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import ItemStatus, ProposeItem, VerifyItem, VerifyRound
from specpool.worker.backend import describe, failure_of

log = logging.getLogger(__name__)


class DeviceRounds:
    """Selects the rounds that the device can run as a whole, and runs them."""

    def __init__(self, target: Engine, proposer: Proposer, layers: tuple[int, ...]) -> None:
        """`layers`: layers of the target whose states the draft reads."""
        self.draft_ns = 0
        """Nanoseconds that the device has spent on drafts so far."""
        self._target, self._proposer, self._draft = target, proposer, proposer.engine
        self._round, self._layers = DeviceRound.of(target, proposer.engine), layers

    def run(
        self,
        rounds: Sequence[VerifyRound],
        ready: Mapping[SequenceKey, VerifyItem],
        spans: Mapping[SequenceKey, Span],
        state_layers: tuple[int, ...],
    ) -> dict[SequenceKey, SpanResult]:
        """Verify realigned items and draft after them. Return no results if the round must run step by step.

        `state_layers`: numbers of layers after which to take the target's states.
        """
        if self._round is None or any(round_.feature_layers for round_ in rounds):
            return {}
        if state_layers and state_layers != self._layers:  # the draft reads them in another order, or some twice
            return {}
        parts = self._parts(self._round, ready, spans)
        if not parts or not self._reserve(rounds, parts):
            return {}
        try:
            results = self._round.run([*parts.values()], state_layers)
        except Exception as error:
            if failure_of(error) is not None:
                raise
            _warn(describe(error))
            return {}
        self.draft_ns += self._round.draft_ns
        return dict(zip(parts, results, strict=True))

    def _parts(
        self, device_round: DeviceRound, ready: Mapping[SequenceKey, VerifyItem], spans: Mapping[SequenceKey, Span]
    ) -> dict[SequenceKey, RoundSpan]:
        """Return the parts of a round; none if it does not fit, or drafts for no sequence."""
        parts = {}
        if self._draft.vocab_size < self._target.vocab_size or device_round.max_tokens < sum(
            len(span.token_ids) for span in spans.values()
        ):
            return {}
        for key, item in ready.items():
            part = self._part(key, item, spans[key])
            if part is None or len(part.span.token_ids) > device_round.max_rows:
                return {}
            parts[key] = part
        return parts if any(part.draft_slot >= 0 for part in parts.values()) else {}

    def _part(self, key: SequenceKey, item: VerifyItem, span: Span) -> RoundSpan | None:
        """Return a sequence's part of a round; None if it needs more than the device does."""
        is_plain = self._target.slots[key].sampling is None and item.logprobs is None and not item.prefill_only
        if not is_plain or len(item.token_ids) != 1:
            return None
        own, slot, max_length = item.own_draft, self._draft.slots.find(key), self._draft.max_model_len
        num_draft_tokens = 0
        if own is not None:
            room = min(own.max_length, self._target.max_model_len, max_length) - (span.start + 2)
            num_draft_tokens = min(own.num_draft_tokens, room)
        if num_draft_tokens <= 0:
            return RoundSpan(span)
        part = RoundSpan(span, -1 if slot is None else slot.index, num_draft_tokens)
        fits = _item_of(key, part).end <= max_length
        return part if slot is not None and fits and _is_current(slot, self._target.slots[key].carried, item) else None

    def _reserve(self, rounds: Sequence[VerifyRound], parts: Mapping[SequenceKey, RoundSpan]) -> bool:
        """Truncate the draft's cache to the committed tokens, and reserve pages for the pass and all steps."""
        for round_ in rounds:
            keys = [(round_.coordinator_id, item.sequence_id) for item in round_.items]
            items = [_item_of(key, parts[key]) for key in keys if key in parts and parts[key].draft_slot >= 0]
            statuses = self._proposer.realign(round_.coordinator_id, round_.round_id, items)
            if any(status is not ItemStatus.OK for status in statuses):
                return False
        return True


def _is_current(slot: Slot, carried: CarriedDraft, item: VerifyItem) -> bool:
    """Whether the draft has cached a sequence's tokens and read the states before them. `slot`: of the draft."""
    base, (token_id,) = item.base_length, item.token_ids
    is_cached = slot.num_cached_tokens > base and slot.token_ids[base] == token_id
    return is_cached and carried.num_agreed >= base and carried.states is None


def _item_of(key: SequenceKey, part: RoundSpan) -> ProposeItem:
    """Return the draft's item for a round that accepts all draft tokens."""
    token_ids = (0,) * len(part.span.token_ids)  # not known yet
    return ProposeItem(key[1], part.span.start + 1, token_ids, num_draft_tokens=part.num_draft_tokens)


@lru_cache(1)
def _warn(reason: str) -> None:
    """Warn once, not in every round."""
    log.warning("the round failed on the device (%s); running it step by step", reason)
