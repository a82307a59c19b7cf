"""The pool: a sliding window of sequences being generated, and the queue behind it. Pure and synchronous.

A sequence is queued -> ready <-> in a round -> leaving -> gone. While it is leaving, it still counts against the
window, because the target worker still holds its slot.
"""

from collections import OrderedDict
from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice

from coordinator.ready import ReadySet
from coordinator.sequence import Finish, FinishReason, Sequence


class PoolFullError(Exception):
    """The queue has no room."""


class DuplicateRequestError(Exception):
    """A request of that id is in flight."""


class Pool:
    """At most `window_size` sequences are generated at a time, at most `queue_size` wait for room.

    `by_length`: those who enter together have prompts of about the same length, rather than being first in the queue.
    """

    def __init__(self, window_size: int, queue_size: int, by_length: bool = False) -> None:
        self.window_size, self.queue_size = window_size, queue_size
        self.rounds = 0
        self._by_length = by_length
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
        admitted = self._next(self.room if most is None else min(most, self.room))
        for sequence in admitted:
            del self._queue[sequence.sequence_id]
            self._make_ready(sequence)
        return admitted

    def _next(self, count: int) -> list[Sequence]:
        """Who enters: the one that waited longest in any case, so that nobody waits for ever."""
        waiting = iter(self._queue.values())
        if not self._by_length or count < 1 or not self._queue:
            return list(islice(waiting, max(0, count)))
        first = next(waiting)
        length = len(first.request.prompt_ids)
        return [first, *nsmallest(count - 1, waiting, key=lambda other: abs(len(other.request.prompt_ids) - length))]

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
