"""Sequences of many coordinators in one engine: the part of a round that drafting and verifying share."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.engine import Engine, EngineInfo
from engine.packing import Span
from engine.sampling import Sampler, SamplingParams
from engine.slots import Realignment


@dataclass(frozen=True)
class Extension:
    """Tokens that follow the first `base_length` cached positions of a sequence.

    `sampling` and `prompt_length` say how its tokens are chosen, with `base_length` 0; later they are known already.
    """

    sequence_id: int
    base_length: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams | None = None
    prompt_length: int = 0


@dataclass(frozen=True)
class Choices:
    """The tokens chosen after the last tokens of a span, and the logits they were chosen from, [n, vocab_size]."""

    token_ids: list[int]
    logits: torch.Tensor


class SequenceEngine:
    """An engine whose slots belong to sequences; the base of both workers' backends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def info(self) -> EngineInfo:
        """The model and its load now."""
        return self.engine.info()

    @property
    def realign_ns(self) -> int:
        """Nanoseconds spent so far on bringing caches to the length and the place where a pass needs them."""
        return self.engine.realign_ns

    def release(self, coordinator_id: str, sequence_ids: list[int]) -> int:
        """Frees sequences; returns how many held a slot."""
        return self.engine.slots.release([(coordinator_id, sequence_id) for sequence_id in sequence_ids])

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Notes that a coordinator is alive at `now`, in seconds of a monotonic clock."""
        self.engine.slots.renew_lease(coordinator_id, now)

    def expire(self, now: float, lease_seconds: float) -> int:
        """Frees the sequences of coordinators silent for longer than the lease; returns how many."""
        return self.engine.slots.expire(now, lease_seconds)

    def realign(self, coordinator_id: str, round_id: int, items: Sequence[Extension]) -> list[Realignment]:
        """Brings every sequence's cache to its base length, or says why not."""
        began, slots = time.perf_counter_ns(), self.engine.slots
        realigned = [slots.realign((coordinator_id, item.sequence_id), round_id, item.base_length) for item in items]
        self.engine.realign_ns += time.perf_counter_ns() - began
        for item, state in zip(items, realigned, strict=True):
            if state is Realignment.OK and item.base_length == 0:
                slots[coordinator_id, item.sequence_id].sampler = self._sampler(item)
        return realigned

    def span(self, coordinator_id: str, sequence_id: int, token_ids: Sequence[int], num_logits: int) -> Span:
        """New tokens behind all that is cached of the sequence."""
        slot = self.engine.slots[coordinator_id, sequence_id]
        if slot.sampler is not None:
            slot.sampler.extend(slot.cached_length, token_ids)
        return Span(slot.index, slot.cached_length, token_ids, num_logits)

    def choose(self, coordinator_id: str, spans: Mapping[int, Span]) -> dict[int, Choices]:
        """Runs the spans, by sequence id, in one forward pass, and chooses a token after each of the last tokens."""
        logits = self.engine.forward(list(spans.values()))
        best = logits.argmax(-1).split([span.num_logits for span in spans.values()])
        rows = logits.split([span.num_logits for span in spans.values()])
        chosen = {}
        for sequence_id, largest, own in zip(spans, best, rows, strict=True):
            sampler = self.engine.slots[coordinator_id, sequence_id].sampler
            chosen[sequence_id] = Choices(largest.tolist() if sampler is None else sampler.choose(own), own)
        return chosen

    def keep(self, coordinator_id: str, sequence_id: int, cached_length: int) -> None:
        """Declares that so many positions of the sequence are valid."""
        self.engine.slots[coordinator_id, sequence_id].cached_length = cached_length

    def _sampler(self, item: Extension) -> Sampler | None:
        if item.sampling is None or item.sampling.is_argmax:
            return None
        # A draft may have fewer rows in its output head than the target has.
        known = range(self.engine.vocab_size)
        params = replace(
            item.sampling,
            stop_token_ids=tuple(token for token in item.sampling.stop_token_ids if token in known),
            logit_bias=tuple((token, bias) for token, bias in item.sampling.logit_bias if token in known),
        )
        return Sampler(params, item.prompt_length)
