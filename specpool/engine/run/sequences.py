"""Sequences of many coordinators in one engine: what drafting and verifying have in common."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat

import torch

from specpool.engine.cache.slots import SequenceKey, Slot
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine
from specpool.engine.sampling.sampler import choose_batch, choose_tokens, kernel_is_exact, largest
from specpool.protocol.rounds import MAX_DRAFT_TOKENS, ItemStatus, RoundLimits, SequenceItem
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.worker_info import CacheLoad, WorkerInfo

ITEMS_PER_SLOT = 4
"""A round may name more sequences than there are slots; the rest get NO_SLOT."""
LOGITS_PER_SLOT = 1 + 4 * MAX_DRAFT_TOKENS
"""Bounds the logits of a round: drafts of four times the usual length in all sequences at once."""


@dataclass(frozen=True)
class Choices:
    """The tokens chosen after the last tokens of a span.

    `confidences`: the model's probability of each token, if requested and decoding is greedy.
    """

    token_ids: Iterable[int]
    confidences: list[float] = field(default_factory=list)
    pass_logits: torch.Tensor | None = None
    """All logits of the pass [R, rows of the head], from row `first` on for this span. None if the device drafted."""
    first: int = 0
    finite: bool = True
    """False if the largest logit of a row is not finite. Checked on CPUs only, where the check takes 10 us a pass.
    A GPU would have to launch more kernels."""


class SequenceEngine:
    """An engine whose slots belong to sequences. Base class of both workers' backends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Compile the kernels now, not in the first round that samples.
        facts = engine.facts
        kernels = kernel_is_exact(facts.device, engine.forward_pass.compute_dtype, engine.vocab_size)
        if facts.device.type == "cuda" and not kernels:
            engine.notes.append("samples slowly, row by row, because its sampling kernels cannot run here")

    def info(self) -> WorkerInfo:
        """Description of the model and its load."""
        return self.engine.info()

    @property
    def load(self) -> CacheLoad:
        """How full the cache is."""
        return self.engine.load

    @property
    def passes(self) -> int:
        """Forward passes so far. While this number grows, long work does not hang."""
        return self.engine.passes

    @property
    def tokens(self) -> int:
        """Tokens run so far."""
        return self.engine.tokens

    @property
    def realign_ns(self) -> int:
        """Nanoseconds spent on realignment so far."""
        return self.engine.realign_ns

    def release(self, coordinator_id: str, sequence_ids: list[int]) -> int:
        """Frees sequences; returns how many held a slot."""
        return self.engine.slots.release([(coordinator_id, sequence_id) for sequence_id in sequence_ids])

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Records that a coordinator is alive at `now`, in seconds of a monotonic clock."""
        self.engine.slots.renew_lease(coordinator_id, now)

    def orphan(self, coordinator_id: str) -> None:
        """Lets a coordinator's sequences yield their slots until its lease is renewed."""
        self.engine.slots.orphan(coordinator_id)

    def expire(self, now: float, lease_seconds: float) -> int:
        """Frees the sequences of coordinators that were silent for longer than the lease; returns how many."""
        return self.engine.slots.expire(now, lease_seconds)

    def realign(self, coordinator_id: str, round_id: int, items: Sequence[SequenceItem]) -> list[ItemStatus]:
        """Brings every sequence's cache to its base length where possible. Returns the status of each."""
        with self.engine.realigning():
            return [self._realign(coordinator_id, round_id, item) for item in items]

    def span(self, coordinator_id: str, sequence_id: int, token_ids: Sequence[int], num_logits: int) -> Span:
        """New tokens after the cached positions of a sequence."""
        slot = self.engine.slots[coordinator_id, sequence_id]
        slot.token_ids[slot.num_cached_tokens :] = token_ids
        return Span(slot.index, slot.num_cached_tokens, token_ids, num_logits)

    def choose(self, coordinator_id: str, spans: Mapping[int, Span], confidences: bool = False) -> dict[int, Choices]:
        """Runs the spans, by sequence id, in one forward pass, and chooses the tokens after their last tokens."""
        logits = self.engine.forward(list(spans.values()))
        counts = [span.num_logits for span in spans.values()]
        probabilities = iter(_largest_probabilities(logits).tolist() if confidences else ())
        slots = [self.engine.slots[coordinator_id, sequence_id] for sequence_id in spans]
        # This line, or the one of the probabilities, waits for a GPU.
        token_ids, finite = self._token_ids(logits, slots, counts)
        rows_finite = iter(finite)
        choices, first = {}, 0
        for sequence_id, slot, tokens, count in zip(spans, slots, token_ids, counts, strict=True):
            own_probabilities = list(islice(probabilities, count))
            is_finite = all(list(islice(rows_finite, count)))
            choices[sequence_id] = Choices(
                tokens, own_probabilities if slot.sampling is None else [], logits, first, is_finite
            )
            first += count
        return choices

    def _token_ids(
        self, logits: torch.Tensor, slots: Sequence[Slot], counts: Sequence[int]
    ) -> tuple[list[Iterable[int]], Iterable[bool]]:
        """`counts` choices for each sequence, from logits [n, rows of the head], and whether each row is finite."""
        known = self.engine.over_vocabulary(logits) if any(slot.sampling is not None for slot in slots) else None
        if known is not None and kernel_is_exact(known.device, known.dtype, known.shape[1]):
            sequences = [(slot.sampling, slot.token_ids, count) for slot, count in zip(slots, counts, strict=True)]
            return [*choose_batch(known, sequences)], repeat(True)
        indexes = largest(logits)
        finite = _are_finite(logits, indexes) if logits.device.type == "cpu" else repeat(True)
        row_tokens = iter(self.engine.token_ids(indexes).tolist())
        greedy: list[Iterable[int]] = [list(islice(row_tokens, count)) for count in counts]
        if known is None:
            return greedy, finite
        sampled = [
            tokens if slot.sampling is None else choose_tokens(rows, slot.sampling, slot.token_ids)
            for tokens, slot, rows in zip(greedy, slots, known.split(counts), strict=True)
        ]
        return sampled, finite

    def keep(self, coordinator_id: str, sequence_id: int, num_cached_tokens: int) -> None:
        """Declares the first `num_cached_tokens` positions of the sequence valid."""
        self.engine.slots[coordinator_id, sequence_id].num_cached_tokens = num_cached_tokens

    def _realign(self, coordinator_id: str, round_id: int, item: SequenceItem) -> ItemStatus:
        slots, key = self.engine.slots, (coordinator_id, item.sequence_id)
        if item.prefix_sequence_id is not None and key not in slots:
            copied = self._copy(key, (coordinator_id, item.prefix_sequence_id), item)
            if copied is not ItemStatus.OK:
                return copied
        state = slots.realign(key, round_id, item.base_length, item.max_length)
        if state is ItemStatus.OK and (item.base_length == 0 or item.prefix_sequence_id is not None):
            slots[key].sampling = self._sampling_of(item.sampling)
        return state

    def _copy(self, key: SequenceKey, source_key: SequenceKey, item: SequenceItem) -> ItemStatus:
        """Starts a sequence from the cache of another one."""
        slots, length = self.engine.slots, item.base_length
        source = slots.find(source_key)
        if source is None or source.num_cached_tokens < length:
            return ItemStatus.CACHE_MISS
        is_own = key == source_key  # released before
        slot = None if is_own else slots.take(key, item.max_length, spared=source_key)
        if slot is not None:
            self.engine.layout.copy(source.index, slot.index, length)
        elif source_key in slots:
            return ItemStatus.NO_SLOT
        else:  # no free extent except the released source
            slot = slots.inherit(key, source_key, item.max_length)
            if slot is None:
                return ItemStatus.CACHE_MISS
        slot.num_cached_tokens, slot.token_ids = length, source.token_ids[:length]
        return ItemStatus.OK

    def limits(self, coordinator_id: str) -> RoundLimits:
        """Limits for the items of a coordinator's round."""

        def capacity(sequence_id: int) -> int | None:
            key = (coordinator_id, sequence_id)
            return self.engine.slots[key].capacity if key in self.engine.slots else None

        slots = self.engine.slots.total
        return RoundLimits(
            self.engine.vocab_size,
            self.engine.max_model_len,
            capacity,
            max_items=ITEMS_PER_SLOT * slots,
            # A single sequence may have a draft of maximum length.
            max_logits=LOGITS_PER_SLOT * max(LOGITS_PER_SLOT, slots),
        )

    def _sampling_of(self, sampling: SamplingParams | None) -> SamplingParams | None:
        """The parameters without token ids that a draft with a smaller vocabulary lacks; None: greedy."""
        if sampling is None or sampling.is_argmax:
            return None
        vocab = range(self.engine.vocab_size)
        return replace(
            sampling,
            stop_token_ids=tuple(token for token in sampling.stop_token_ids if token in vocab),
            logit_bias=tuple((token, bias) for token, bias in sampling.logit_bias if token in vocab),
        )


def _are_finite(logits: torch.Tensor, indexes: torch.Tensor) -> list[bool]:
    """Whether the largest logit of each row, at `indexes`, is finite."""
    # Indexing numpy rows takes half the time of a vectorized operation. Numpy has no bfloat16.
    rows = logits.numpy() if logits.dtype == torch.float32 else logits
    return [math.isfinite(row[index]) for row, index in zip(rows, indexes.tolist(), strict=True)]


def _largest_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Probability [n] of the largest logit in each row of [n, rows of the head]."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()
