"""The requests in flight, the queue that all windows share, and the window of each running sequence. Pure."""

from typing import Generic, TypeVar

from coordinator.scheduling.fair_queue import FairQueue, Request
from coordinator.scheduling.sequence import Sequence

W = TypeVar("W")
"""A window. The registry only passes it on."""


class Registry(Generic[W]):
    """Knows of each unfinished sequence whether it waits, holds a place in a window, or is preempted."""

    def __init__(self, by_length: bool = False) -> None:
        self.waiting = FairQueue(by_length)
        self.preempted: dict[int, Sequence] = {}
        """Preempted sequences that are not queued yet: they still hold a slot, or are paused."""
        self.windows: list[W] = []
        self.requests: dict[tuple[str, str], Request] = {}
        self._window_of: dict[int, W] = {}
        """Of the sequences that hold a place, by id."""

    @property
    def queued(self) -> int:
        return len(self.waiting)

    @property
    def in_flight(self) -> list[Sequence]:
        """All unfinished sequences, queued or in a window."""
        return [sample for request in self.requests.values() for sample in request.samples.values()]

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is queued or preempted."""
        return not (self.waiting or self.preempted)

    def of(self, sequence: Sequence) -> Request:
        """The request of an unfinished sequence."""
        return self.requests[sequence.request.key]

    def window_of(self, sequence: Sequence) -> W | None:
        """The window in which a sequence holds a place."""
        return self._window_of.get(sequence.sequence_id)

    def add(self, samples: list[Sequence]) -> None:
        """Queue the samples of a new request."""
        self.requests[samples[0].request.key] = self.waiting.add(samples)

    def enter(self, sequence: Sequence, window: W) -> None:
        """Move a waiting sequence into a window."""
        self.waiting.enter(sequence)
        self._window_of[sequence.sequence_id] = window

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence out of its window. It keeps its place until `release`."""
        self.preempted[sequence.sequence_id] = sequence
        self.waiting.leave(sequence.sequence_id)

    def release(self, sequence_id: int, goes_first: bool = False) -> None:
        """Free the place of a sequence. If it was preempted, queue it."""
        self._window_of.pop(sequence_id, None)
        self.waiting.leave(sequence_id)
        self.requeue(sequence_id, goes_first)

    def requeue(self, sequence_id: int, goes_first: bool = False) -> None:
        """Queue a preempted sequence once its reader has caught up and its slot is released.

        `goes_first`: before other requests of its client.
        """
        sequence = self.preempted.get(sequence_id)
        if sequence is not None and not sequence.paused and sequence_id not in self._window_of:
            del self.preempted[sequence_id]
            self.waiting.add([sequence], self.of(sequence), goes_first)

    def forget(self, sequence: Sequence) -> None:
        """Remove the sample from its request. After an abort, another request may already use the same id."""
        key = sequence.request.key
        request = self.requests.get(key)
        if request is None or request.samples.pop(sequence.sequence_id, None) is None:
            return
        if not request.samples:
            del self.requests[key]

    def check_integrity(self) -> None:
        """Raise AssertionError if a sequence is lost or in two states."""
        self.waiting.check_integrity()
        queued, places = {sequence.sequence_id for sequence in self.waiting}, set(self._window_of)
        assert not queued & places, "a queued sequence holds a place"
        assert not queued & self.preempted.keys(), "a queued sequence is held back"
        for sequence in self.in_flight:
            assert sequence.sequence_id in queued | places | self.preempted.keys(), "a sequence is lost"
