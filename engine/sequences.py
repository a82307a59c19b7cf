"""Sequences of many coordinators in one engine: the part of a round that drafting and verifying share."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.engine import Engine, EngineInfo
from engine.packing import Span
from engine.slots import Realignment


@dataclass(frozen=True)
class Extension:
    """Tokens that follow the first `base_length` cached positions of a sequence."""

    sequence_id: int
    base_length: int
    token_ids: tuple[int, ...]


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
        return realigned

    def span(self, coordinator_id: str, sequence_id: int, token_ids: Sequence[int], num_logits: int) -> Span:
        """New tokens behind all that is cached of the sequence."""
        slot = self.engine.slots[coordinator_id, sequence_id]
        return Span(slot.index, slot.cached_length, token_ids, num_logits)

    def keep(self, coordinator_id: str, sequence_id: int, cached_length: int) -> None:
        """Declares that so many positions of the sequence are valid."""
        self.engine.slots[coordinator_id, sequence_id].cached_length = cached_length
