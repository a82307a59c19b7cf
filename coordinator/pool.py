"""The pool: a sliding window of sequences being generated, and the queue behind it. Pure and synchronous.

A sequence is queued -> ready <-> in a round -> leaving -> gone. While it is leaving, it still counts against the
window, because the target worker still holds its slot.
"""

from collections import OrderedDict
from collections.abc import Iterable

from coordinator.sequence import Finish, FinishReason, Sequence


class PoolFullError(Exception):
    """The queue has no room."""


class DuplicateRequestError(Exception):
    """A request of that id is in flight."""


class Pool:
    """At most `window_size` sequences are generated at a time, at most `queue_size` wait for room."""

    def __init__(self, window_size: int, queue_size: int) -> None:
        self.window_size, self.queue_size = window_size, queue_size
        self._queue: OrderedDict[int, Sequence] = OrderedDict()
        self._ready: OrderedDict[int, Sequence] = OrderedDict()
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
    def _room(self) -> int:
        """Sequences that `admit` could let in."""
        return max(0, self.window_size - len(self._ready) - len(self._in_round) - len(self._leaving))

    @property
    def is_empty(self) -> bool:
        """Whether no sequence waits, is generated, or still holds a slot."""
        return not (self._queue or self._ready or self._in_round or self._leaving)

    @property
    def ready(self) -> Iterable[Sequence]:
        """Sequences that could play a round now, the one that waited longest first."""
        return self._ready.values()

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence; `admit` lets it in. PoolFullError, DuplicateRequestError."""
        if sequence.request.request_id in self._by_request:
            raise DuplicateRequestError(sequence.request.request_id)
        if len(self._queue) >= self.queue_size + self._room:  # who finds room in the window will not wait
            raise PoolFullError
        self._queue[sequence.sequence_id] = sequence
        self._by_request[sequence.request.request_id] = sequence

    def admit(self) -> list[Sequence]:
        """Moves the longest-waiting sequences into the window while it has room, and returns them."""
        admitted = []
        while self._queue and self._room:
            sequence_id, sequence = self._queue.popitem(last=False)
            self._ready[sequence_id] = sequence
            admitted.append(sequence)
        return admitted

    def begin_round(self, group: Iterable[Sequence]) -> None:
        """The group's sequences are not ready until `end_round`."""
        for sequence in group:
            self._in_round[sequence.sequence_id] = self._ready.pop(sequence.sequence_id)

    def end_round(self, group: Iterable[Sequence]) -> None:
        """Those of the group that have not finished are ready again, behind all others."""
        for sequence in group:
            if self._in_round.pop(sequence.sequence_id, None) is None:
                continue
            if sequence.finish is None:
                self._ready[sequence.sequence_id] = sequence
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
        if self._ready.pop(sequence.sequence_id, None) is not None:
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
        places = [set(self._queue), set(self._ready), set(self._in_round), self._leaving]
        assert len(set().union(*places)) == sum(map(len, places)), "a sequence is in two places"
        assert sum(map(len, places[1:])) <= self.window_size, "the window is exceeded"
        assert len(self._queue) <= self.queue_size + self._room, "the queue is exceeded"
