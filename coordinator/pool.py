"""The pool: a sliding window of sequences being generated, and the queue behind it. Pure and synchronous.

A sequence is queued -> ready <-> in a round -> leaving -> gone. While it is leaving, it still counts against the
window, because the target worker still holds its slot.
"""

from collections import OrderedDict
from collections.abc import Iterable

from coordinator.ready import ReadySet
from coordinator.sequence import Finish, FinishReason, Sequence

# Newcomers that may enter before the one that waits longest, where admission is by length.
MOST_PASSED_OVER = 16


class PoolFullError(Exception):
    """The queue has no room."""


class DuplicateRequestError(Exception):
    """A request of that id is in flight."""


class Pool:
    """At most `window_size` sequences are generated at a time, at most `queue_size` wait for room.

    `by_length`: the next to enter has a prompt of about the last one's length, rather than being first in the queue.
    """

    def __init__(self, window_size: int, queue_size: int, by_length: bool = False) -> None:
        self.window_size, self.queue_size = window_size, queue_size
        self.rounds = 0
        self._by_length = by_length
        self._last_length = 0
        self._passed_over = 0
        self._queue: OrderedDict[int, Sequence] = OrderedDict()
        self._ready = ReadySet()
        self._in_round: dict[int, Sequence] = {}
        self._leaving: set[int] = set()
        self._by_request: dict[str, Sequence] = {}

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Sequences being generated."""
        return len(self._by_request) - len(self._queue)

    @property
    def room(self) -> int:
        """Sequences that `admit` could let in."""
        return max(0, self.window_size - len(self._ready) - len(self._in_round) - len(self._leaving))

    @property
    def is_empty(self) -> bool:
        """Whether no sequence waits, is generated, or still holds a slot."""
        return not (self._queue or self._ready or self._in_round or self._leaving)

    @property
    def ready(self) -> ReadySet:
        """Sequences that could play a round now."""
        return self._ready

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence; `admit` lets it in. PoolFullError, DuplicateRequestError."""
        if sequence.request.request_id in self._by_request:
            raise DuplicateRequestError(sequence.request.request_id)
        if len(self._queue) >= self.queue_size + self.room:  # who finds room in the window will not wait
            raise PoolFullError
        self._queue[sequence.sequence_id] = sequence
        self._by_request[sequence.request.request_id] = sequence

    def admit(self, most: int | None = None) -> list[Sequence]:
        """Moves waiting sequences, at most `most`, into the window while it has room, and returns them."""
        admitted = []
        for _ in range(min(self.queued, self.room if most is None else min(most, self.room))):
            sequence = self._queue.pop(self._next())
            self._make_ready(sequence)
            admitted.append(sequence)
        return admitted

    def _next(self) -> int:
        """Who enters: whose prompt is nearest to the last one's in length, or who was passed over too often."""
        chosen = oldest = next(iter(self._queue))
        if self._by_length and self._passed_over < MOST_PASSED_OVER:
            chosen = min(self._queue, key=lambda waiting: abs(self._queue[waiting].prompt_length - self._last_length))
        self._passed_over = 0 if chosen == oldest else self._passed_over + 1
        self._last_length = self._queue[chosen].prompt_length
        return chosen

    def _make_ready(self, sequence: Sequence) -> None:
        sequence.ready_since = self.rounds
        self._ready.add(sequence)

    def begin_round(self, group: Iterable[Sequence]) -> None:
        """The group's sequences are not ready until `end_round`."""
        self.rounds += 1
        for sequence in group:
            self._in_round[sequence.sequence_id] = self._ready.pop(sequence.sequence_id)

    def end_round(self, group: Iterable[Sequence]) -> None:
        """Those of the group that have not finished are ready again, behind all others."""
        for sequence in group:
            if self._in_round.pop(sequence.sequence_id, None) is None:
                continue
            if sequence.finish is None:
                self._make_ready(sequence)
            else:
                self._leaving.add(sequence.sequence_id)
                # The id of one that was aborted may be another's by now.
                if self.find(sequence.request.request_id) is sequence:
                    del self._by_request[sequence.request.request_id]

    def find(self, request_id: str) -> Sequence | None:
        """The sequence in flight for a request."""
        return self._by_request.get(request_id)

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is; one in a round leaves at its end. Does nothing to one that has finished."""
        if self._by_request.get(sequence.request.request_id) is not sequence or sequence.finish is not None:
            return
        sequence.finish = Finish(FinishReason.ABORT)
        del self._by_request[sequence.request.request_id]
        self._queue.pop(sequence.sequence_id, None)
        if sequence.sequence_id in self._ready:
            self._ready.pop(sequence.sequence_id)
            self._leaving.add(sequence.sequence_id)

    @property
    def leaving(self) -> set[int]:
        """Ids of sequences whose slots are to be released."""
        return set(self._leaving)

    def released(self, sequence_ids: Iterable[int]) -> None:
        """The workers have freed these sequences: the window has room again."""
        self._leaving.difference_update(sequence_ids)

    def check_integrity(self) -> None:
        """Raises AssertionError if a sequence is in two places or the window is exceeded."""
        ready = {sequence.sequence_id for sequence in self._ready}
        places = [set(self._queue), ready, set(self._in_round), self._leaving]
        assert len(set().union(*places)) == sum(map(len, places)), "a sequence is in two places"
        assert sum(map(len, places[1:])) <= self.window_size, "the window is exceeded"
        assert len(self._queue) <= self.queue_size + self.room, "the queue is exceeded"
