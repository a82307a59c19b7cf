"""Sequences of many coordinators in one engine: the base of drafting and verification."""

import math
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import torch

from specpool.engine.cache.slots import SequenceKey, Slot
from specpool.engine.cache.spans import Span
from specpool.engine.passes.drafts import Choice, Draft, DraftRound, drafts_of, extend_drafts
from specpool.engine.passes.gpu.choice import choose
from specpool.engine.run.engine import Engine
from specpool.engine.sampling.batch import Sampler
from specpool.engine.sampling.grammars import Grammars, settle
from specpool.engine.sampling.ranking import Ranking, rank_rows
from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import SequenceRules
from specpool.engine.sampling.sampler import kernel_is_exact
from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.rounds import MAX_DRAFT_TOKENS, ItemStatus, RoundLimits, SequenceItem
from specpool.protocol.sampling import NO_LOGPROBS, Logprobs, SamplingParams
from specpool.protocol.worker_info import CacheLoad, ModelWork, WorkerInfo

ITEMS_PER_SLOT = 4
"""A round may name more sequences than there are slots; the rest get NO_SLOT."""
GRAMMAR_SECONDS = 0.01
"""Maximum wait for new grammars before a pass, and for masks after it. The round then leaves late sequences out."""
LOGITS_PER_SLOT = 1 + 4 * MAX_DRAFT_TOKENS
"""Bounds the logits of a round: drafts of four times the usual length in all sequences at once."""

Item = TypeVar("Item", bound=SequenceItem)


@dataclass(slots=True)  # not frozen, like `Span`
class Choices:
    """The tokens chosen after the last tokens of a span, up to the first that differs from the span's draft.

    `confidences`: the model's probability of each token, if requested and decoding is greedy.
    """

    token_ids: list[int]
    confidences: list[float] = field(default_factory=list)
    logprobs: Logprobs = NO_LOGPROBS
    """Log-probabilities of `token_ids`, if requested."""
    finite: bool = True
    """False if the largest logit of a row is not finite."""
    states: torch.Tensor | None = None
    """States after the span's last `num_states` tokens, bfloat16 [num_states, width] on the model's device. None
    if not requested."""

    def first(self, count: int) -> Self:
        """Return the choices of the first `count` rows."""
        return replace(self, token_ids=self.token_ids[:count], logprobs=self.logprobs.first(count))


class SequenceEngine:
    """An engine whose slots belong to sequences. Base class of both workers' backends."""

    requires_grammars = False
    """Whether to fail a sequence whose grammar is unusable, instead of ignoring the grammar."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Compile the kernels now, not in the first round that samples.
        facts = engine.facts
        self._has_kernels = kernel_is_exact(facts.device, engine.forward_pass.compute_dtype, engine.vocab_size)
        if facts.device.type == "cuda" and not self._has_kernels:
            engine.notes.append("samples slowly, row by row, because its sampling kernels cannot run here")
        self._sampler = Sampler(engine.head, facts.device, engine.native)
        self.grammars = Grammars(engine.loaded.tokenizer, engine.vocab_size, engine.grammar_bytes)
        self._grammar_deadline = 0.0
        """When the current round stops waiting for grammars before its pass, in seconds of `time.monotonic`."""

    def info(self) -> WorkerInfo:
        """Description of the model and its load."""
        return replace(self.engine.info(), supports_grammars=self.grammars.why_unsupported is None)

    @property
    def load(self) -> CacheLoad:
        """How full the cache is."""
        return self.engine.load

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum tokens of a forward pass."""
        return self.engine.max_num_batched_tokens

    @property
    def passes(self) -> int:
        """Forward passes so far. While this number grows, long work does not hang."""
        return self.engine.passes

    @property
    def work(self) -> ModelWork:
        """The work of the model, without that of a carried draft."""
        return ModelWork(self.engine.realign_ns, self.engine.passes, self.engine.tokens)

    @property
    def realign_ns(self) -> int:
        """Nanoseconds spent on realignment so far."""
        return self.engine.realign_ns

    @property
    def draft_ns(self) -> int:
        """Nanoseconds that the carried draft has taken so far, without realignment."""
        return 0

    @property
    def carried_draft(self) -> "SequenceEngine | None":
        """The draft that a target worker carries, if any."""
        return None

    def release(self, coordinator_id: str, sequence_ids: list[int] | None) -> int:
        """Free sequences, or all of a coordinator; return how many held a slot."""
        if sequence_ids is None:
            return self.engine.slots.release_all(coordinator_id)
        return self.engine.slots.release([(coordinator_id, sequence_id) for sequence_id in sequence_ids])

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Record that a coordinator is alive at `now`, in seconds of a monotonic clock."""
        self.engine.slots.renew_lease(coordinator_id, now)

    def orphan(self, coordinator_id: str) -> None:
        """Let a coordinator's sequences yield their slots until its lease is renewed."""
        self.engine.slots.orphan(coordinator_id)

    def expire(self, now: float, lease_seconds: float) -> int:
        """Free the sequences of coordinators that were silent for longer than the lease; return how many."""
        return self.engine.slots.expire(now, lease_seconds)

    def take_evicted(self, coordinator_id: str, limit: int) -> list[bytes]:
        """Return at most `limit` digests of evicted pages not yet reported to the coordinator."""
        return self.engine.slots.take_evicted(coordinator_id, limit)

    def shrink_passes(self) -> bool:
        """Free unused device memory and make passes smaller. Return False if they cannot be smaller."""
        return self.engine.shrink_passes()

    def realign(self, coordinator_id: str, round_id: int, items: Sequence[SequenceItem]) -> list[ItemStatus]:
        """Bring every sequence's cache to its base length where possible. Return the status of each.

        Tokens found in the prefix cache become part of an item's base. Raises InvalidArgumentError, before any change,
        if an item needs more positions than a sequence may have.
        """
        for index, item in enumerate(items):
            if item.end > (maximum := self.engine.max_model_len):
                reason = f"needs {item.end} positions, more than the maximum of {maximum}"
                raise InvalidArgumentError(f"items[{index}]", reason)
        self._grammar_deadline = time.monotonic() + GRAMMAR_SECONDS
        with self.engine.realigning():
            return [self._realign(coordinator_id, round_id, item) for item in items]

    def has_room(self, coordinator_id: str, sequence_id: int) -> bool:
        """Whether a sequence has a slot, or may get one without an eviction of other coordinators."""
        slots = self.engine.slots
        return (coordinator_id, sequence_id) in slots or slots.in_use < slots.total

    def span(
        self,
        key: SequenceKey,
        token_ids: Sequence[int],
        num_logits: int,
        states: torch.Tensor | None = None,
        num_states: int = 0,
        num_tentative: int = 0,
    ) -> Span:
        """New tokens after the cached positions of a sequence. `states`, `num_states`, `num_tentative`: see `Span`."""
        slot = self.engine.slots[key]
        own_states = _take_own_states(slot, token_ids) if slot.own_states else None
        slot.token_ids[slot.num_cached_tokens :] = token_ids
        if slot.sampling is not None:
            slot.sampling.truncate(slot.num_cached_tokens)
        return Span(
            slot.index,
            slot.num_cached_tokens,
            token_ids,
            num_logits,
            states=states,
            own_states=own_states,
            num_states=num_states,
            num_tentative=num_tentative,
        )

    def choose(
        self,
        spans: Mapping[SequenceKey, Span],
        confidences: bool = False,
        num_logprobs: Mapping[SequenceKey, int | None] | None = None,
        state_layers: tuple[int, ...] = (),
    ) -> dict[SequenceKey, Choices]:
        """Run the spans in one forward pass, and choose the tokens after their last tokens.

        `num_logprobs`: number of top log-probabilities of sequences that need log-probabilities. `state_layers`:
        numbers of layers after which to take the states of the spans' last `num_states` tokens.
        """
        rows = self._rows_of(spans, num_logprobs or {})
        return dict(zip(spans, self.choose_rows(list(spans.values()), rows, confidences, state_layers), strict=True))

    def choose_rows(
        self,
        spans: Sequence[Span],
        rows: Sequence[SequenceRows],
        confidences: bool = False,
        state_layers: tuple[int, ...] = (),
    ) -> list[Choices]:
        """Run the spans in one forward pass, and choose the tokens of their rows of logits. See `choose`."""
        if confidences:
            rows = [replace(each, num_logprobs=0) if each.rules is None else each for each in rows]
        jobs = self.grammars.compute(
            (each.rules.grammar, each.token_ids, each.count)
            for each in rows
            if each.rules is not None and each.rules.grammar is not None and each.prefix_length is None and each.count
        )
        found: torch.Tensor | None = None
        try:
            if state_layers:
                logits, found = self.engine.forward_with_states(spans, state_layers)
            else:
                logits = self.engine.forward(spans)
        finally:
            settle(jobs, GRAMMAR_SECONDS)
        choices, sampled = [], self._sampler(logits, rows)
        states: Sequence[torch.Tensor | None] = [None] * len(spans)
        if found is not None:
            states = found.split([span.num_states for span in spans])
        for each, chosen, own_states in zip(rows, sampled, states, strict=True):
            sure = [*map(math.exp, chosen.logprobs.logprobs)] if confidences and each.rules is None else []
            choices.append(Choices(chosen.token_ids, sure, chosen.logprobs, chosen.finite, own_states))
        return choices

    def draft(self, rounds: Sequence[DraftRound]) -> None:
        """Extend the drafts of all rounds until each round has enough, entirely on the device if possible.

        Sequences stay as they are; `draft.context` may be the tokens of one.
        """
        if self.engine.can_draft(drafts_of(rounds)):
            self.engine.draft(rounds)
        else:
            extend_drafts(rounds, self._choose_next)

    def _choose_next(self, drafts: Sequence[Draft]) -> list[Choice | None]:
        spans = [draft.span for draft in drafts]
        if self._has_kernels and all(draft.rules is None for draft in drafts):
            choices = self._choose_greedily(spans)
        else:
            confidences = any(draft.needs_confidences for draft in drafts)
            choices = [*map(_single, self.choose_rows(spans, [draft.rows for draft in drafts], confidences))]
        if self.engine.own_states is not None:
            drafting = (draft for draft in drafts if draft.span.num_logits)
            for draft, state in zip(drafting, self.engine.own_states[:, None], strict=True):
                draft.own_states.append(state)
        return choices

    def _choose_greedily(self, spans: Sequence[Span]) -> list[Choice | None]:
        """Run a greedy step on a GPU. The host waits once, for tokens and confidences, which need not be exact."""
        logits = self.engine.forward(spans)
        found = iter(choose(logits, self.engine.head).T.tolist() if len(logits) else [])
        chosen = [next(found) if span.num_logits else None for span in spans]
        return [None if each is None else Choice(int(each[0]), each[1]) for each in chosen]

    def rank(self, spans: Mapping[SequenceKey, Span], count: int) -> dict[SequenceKey, list[Ranking]]:
        """Run the spans in one forward pass. Rank the `count` best tokens after each of their last tokens.

        The first token of each row is the one that `choose` would choose. Probabilities of sampled sequences are the
        softmax of scores with noise, so they are rough. Rows whose largest logit is not finite rank no tokens.
        """
        logits, own_states = self.engine.forward(list(spans.values())), self.engine.own_states
        if own_states is not None:
            counts = [span.num_logits for span in spans.values()]
            parts = zip(spans.items(), own_states.split(counts), strict=True)
            self.keep_states({key: (span.end, [part]) for (key, span), part in parts if span.num_logits})
        return dict(zip(spans, rank_rows(logits, self._rows_of(spans, {}), self.engine.head, count), strict=True))

    def forced(self, key: SequenceKey, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """At most `limit` forced tokens after new tokens of a sequence."""
        slot = self.engine.slots[key]
        if slot.sampling is None or not slot.sampling.params.may_force_tokens:
            return ()
        self.span(key, token_ids, 0)
        room = min(self.engine.slots.capacity(slot), self.engine.max_model_len) - len(slot.token_ids)
        return slot.sampling.forced(slot.token_ids, min(limit, room))

    def keep(
        self, key: SequenceKey, num_cached_tokens: int, next_token: int | None = None, num_accepted: int = 0
    ) -> None:
        """Declare the first `num_cached_tokens` positions of the sequence valid.

        `next_token`: the token after them, with which the next round may continue. `num_accepted`: number of draft
        tokens that this round accepted.
        """
        self.engine.slots.keep(key, num_cached_tokens)
        slot = self.engine.slots[key]
        slot.next_token, slot.num_accepted = next_token, num_accepted

    def keep_states(self, states: Mapping[SequenceKey, tuple[int, Sequence[torch.Tensor]]]) -> None:
        """Keep a feature draft's own states.

        `states`: the end of each sequence, and parts [n, hidden] of the states after its last positions. Earlier states
        that the round began with stay, so that a repeated round gives the same draft.
        """
        if not states:
            return
        joined = torch.cat([part for _, parts in states.values() for part in parts])
        sizes = [sum(map(len, parts)) for _, parts in states.values()]
        copies = [joined.new_empty(size, joined.shape[1]) for size in sizes]
        torch.split_with_sizes_copy(joined, sizes, out=copies)  # views would keep the states of all sequences
        for (key, (end, _)), own in zip(states.items(), copies, strict=True):
            slot = self.engine.slots[key]
            slot.own_states = {**dict(enumerate(own, end - len(own) + 1)), **slot.own_states}

    def _rows_of(
        self, spans: Mapping[SequenceKey, Span], num_logprobs: Mapping[SequenceKey, int | None]
    ) -> list[SequenceRows]:
        slots = {key: self.engine.slots[key] for key in spans}
        return [
            SequenceRows(slot.sampling, slot.token_ids, spans[key].num_logits, num_logprobs.get(key))
            for key, slot in slots.items()
        ]

    def _realign(self, coordinator_id: str, round_id: int, item: SequenceItem) -> ItemStatus:
        slots, key = self.engine.slots, (coordinator_id, item.sequence_id)
        if not item.token_ids:  # it was to continue after a round that is not its last one
            return ItemStatus.STALE_ROUND if slots.is_stale(key, round_id) else ItemStatus.CACHE_MISS
        is_new = key not in slots
        if is_new and not slots.admits(coordinator_id):
            status = ItemStatus.CACHE_MISS if item.base_length else ItemStatus.NO_SLOT
        else:
            status = self._realign_admitted(key, round_id, item)
        if is_new:
            slots.answered(coordinator_id, status)
        return status

    def _realign_admitted(self, key: SequenceKey, round_id: int, item: SequenceItem) -> ItemStatus:
        slots, is_first_contact = self.engine.slots, item.base_length == 0
        if is_first_contact and (status := self._grammar_status(item.sampling)) is not ItemStatus.OK:
            return status
        if self.requires_grammars and not self._has_masks(slots.find(key)):
            return ItemStatus.GRAMMAR_NOT_READY
        status = slots.realign(key, round_id, item, min(item.max_end, self.engine.max_model_len))
        if status is ItemStatus.OK and is_first_contact:
            slots[key].sampling = self._rules_of(item.sampling)
        return status

    def _grammar_status(self, sampling: SamplingParams | None) -> ItemStatus:
        if sampling is None or not sampling.grammar or (self.grammars.why_unsupported and not self.requires_grammars):
            return ItemStatus.OK
        if not self.grammars.wait(sampling.grammar, max(0.0, self._grammar_deadline - time.monotonic())):
            return ItemStatus.GRAMMAR_NOT_READY
        failed = self.requires_grammars and self.grammars.error_of(sampling.grammar)
        return ItemStatus.GRAMMAR_FAILED if failed else ItemStatus.OK

    def _has_masks(self, slot: Slot | None) -> bool:
        """Wait for masks that were late in the sequence's last round. Return whether they are complete."""
        if slot is None or slot.sampling is None or slot.sampling.grammar is None:
            return True
        return slot.sampling.grammar.wait(max(0.0, self._grammar_deadline - time.monotonic()))

    @property
    def limits(self) -> RoundLimits:
        """Limits for the items of a round. Any thread may read them."""
        slots = self.engine.slots.total
        return RoundLimits(
            self.engine.vocab_size,
            self.engine.max_model_len,
            max_items=ITEMS_PER_SLOT * slots,
            # A single sequence may have a draft of maximum length.
            max_logits=LOGITS_PER_SLOT * max(LOGITS_PER_SLOT, slots),
            num_layers=self.engine.facts.layers if self.engine.has_states else 0,
            hidden_size=self.engine.facts.hidden_size,
        )

    def _rules_of(self, sampling: SamplingParams | None) -> SequenceRules | None:
        """Return the rules of a new sequence. None: greedy."""
        if sampling is None:
            return None
        if sampling.grammar and self.grammars.error_of(sampling.grammar):
            sampling = replace(sampling, grammar="")
        known = sampling.within(self.engine.vocab_size)
        if known.is_argmax:
            return None
        start, block = self.grammars.start, self.grammars.block(known)
        return SequenceRules(known, start(known.grammar, known.prompt_length, block) if known.grammar else None, block)


def own_items(items: Sequence[Item]) -> list[Item]:
    """Return a round's items. Copy those that `realign` may change, because a failed round is repeated."""
    return [copy(item) if len(item.token_ids) > 1 else item for item in items]


def _take_own_states(slot: Slot, token_ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """A feature draft's own states before new tokens, by index; the slot keeps no others.

    A state is valid if it was computed after the same tokens.
    """
    start, before = slot.num_cached_tokens, slot.token_ids[slot.num_cached_tokens :]
    differing = (index for index, pair in enumerate(zip(before, token_ids, strict=False)) if pair[0] != pair[1])
    valid = next(differing, min(len(before), len(token_ids) - 1))
    slot.own_states = {length: state for length, state in slot.own_states.items() if 0 <= length - start <= valid}
    return {length - start: state for length, state in slot.own_states.items()}


def _single(choices: Choices) -> Choice | None:
    """The single choice; None if the span requests no logits."""
    if not choices.token_ids:
        return None
    (token_id,), confidences = choices.token_ids, choices.confidences
    return Choice(token_id, confidences[0] if confidences else None, choices.finite)
