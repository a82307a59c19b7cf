"""The queue that all windows share: admits requests, and says which windows may run them. Pure.

Each target worker has a window. A sequence runs in one window at a time, and a preempted one may continue in another.
All target workers choose the same tokens.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice

from coordinator.scheduling.capacity import DuplicateRequestError, QueueLimitError, QueueLimits
from coordinator.scheduling.registry import Registry
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from coordinator.scheduling.window import Window


class RequestQueue(Registry[Window]):
    """Queues requests, and passes them on to windows. `QueueLimits` bounds the queue."""

    def __init__(self, limits: QueueLimits, by_length: bool = False) -> None:
        """`by_length`: admit equally long sequences of a client one after the other."""
        super().__init__(by_length)
        self.limits = limits

    @property
    def has_open_window(self) -> bool:
        return any(window.is_open for window in self.windows)

    @property
    def _usable_windows(self) -> list[Window]:
        """The open windows. Without any, all: sequences wait for the first to open."""
        return [window for window in self.windows if window.is_open] or self.windows

    @property
    def coming(self) -> int:
        """Places that are free, or soon will be."""
        return sum(window.coming for window in self._usable_windows)

    def submit(self, samples: Iterable[Sequence]) -> None:
        """Queue the samples of a request, all or none. Raises QueueLimitError, DuplicateRequestError."""
        new = list(samples)
        (key,) = {sample.request.key for sample in new}
        if key in self.requests:
            raise DuplicateRequestError(key)
        check, tokens = partial(self._check_limits, key[0], len(new)), sum(sample.num_queued_tokens for sample in new)
        try:
            check(tokens, entering=0)
        except QueueLimitError:  # counting the sequences that enter takes longer, so do it only if needed
            places = sum(window.capacity for window in self._usable_windows)
            waiting = list(islice(chain(self.waiting, new), places))
            entering = self._count_fitting(waiting)
            entering_tokens = sum(sample.num_queued_tokens for sample in waiting[:entering])
            check(tokens - entering_tokens, entering=entering)
        self.add(new)

    def check(self, request: GenerationRequest) -> None:
        """Raise the errors of `submit` that do not depend on the prompt."""
        if request.key in self.requests:
            raise DuplicateRequestError(request.key)
        entering = min(sum(window.capacity for window in self._usable_windows), len(self.waiting) + request.n)
        self._check_limits(request.client, request.n, 0, entering=entering)

    def _check_limits(self, client: str, samples: int, tokens: int, *, entering: int) -> None:
        preempted = sum(sequence.request.client == client for sequence in self.preempted.values())
        reserve = sum(window.max_num_seqs for window in self._usable_windows)
        entering += sum(len(window.background) for window in self.windows)
        self.limits.check(
            self.waiting, client, samples, tokens, entering=entering, reserve=reserve, preempted=preempted
        )

    def _count_fitting(self, waiting: list[Sequence]) -> int:
        count = 0
        for window in self._usable_windows:
            count += window.count_fitting(islice(waiting, count, None))
        return count

    def candidates(self, windows: Iterable[Window], max_overtaken: int) -> Iterator[Sequence]:
        """Waiting sequences that may enter one of these windows next if they fit, first to last.

        Only the first one, once `max_overtaken` others have entered before it.
        """
        windows = list(windows)
        allowed = (s for s in self.waiting.in_turn() if any(self.may_enter(s, window) for window in windows))
        first = next(allowed, None)
        if first is not None:
            yield from chain([first], allowed if first.overtaken < max_overtaken else ())

    def may_enter(self, sequence: Sequence, window: Window) -> bool:
        """Whether a window may run a sequence: it follows the sequence's grammar, or no window does."""
        return not sequence.request.constraint or window.follows_grammars or not self._follows_grammars

    def may_leave(self, sequence: Sequence, window: Window) -> bool:
        """Whether another open window may continue a sequence of this window."""
        others = (other for other in self.windows if other.is_open and other is not window)
        return any(other.follows_grammars or not sequence.request.constraint for other in others)

    @property
    def _follows_grammars(self) -> bool:
        return any(window.follows_grammars for window in self.windows)

    def pause(self, sequence: Sequence) -> None:
        """Keep a sequence out of later rounds until `resume`. It holds its slot until another sequence needs it."""
        sequence.paused = True
        if (window := self.window_of(sequence)) is not None:
            window.hold_back(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Make a paused sequence ready again, behind all others. Queue it if it was preempted."""
        sequence.paused = False
        self.requeue(sequence.sequence_id)
        if (window := self.window_of(sequence)) is not None:
            window.let_go(sequence)

    def find(self, client: str, request_id: str) -> list[Sequence]:
        """The samples of a client's request that are in flight."""
        request = self.requests.get((client, request_id))
        return list(request.samples.values()) if request is not None else []

    def abort(self, sequence: Sequence) -> None:
        """End an unfinished sequence in any state. In a round, it leaves after the round."""
        request, sequence_id = self.requests.get(sequence.request.key), sequence.sequence_id
        if request is None or sequence_id not in request.samples or sequence.finish is not None:
            return
        sequence.end(Finish(FinishReason.ABORT))
        self.forget(sequence)
        if self.preempted.pop(sequence_id, None) is not None:
            return  # it holds no slot, or is already leaving
        if sequence_id in self.waiting:
            self.waiting.discard(sequence)
        elif (window := self.window_of(sequence)) is not None:
            window.discard(sequence)

    def vacate(self, window: Window) -> set[int]:
        """Queue the sequences that other open windows may continue, without waiting for their slots. Return their ids.

        Call it when the target worker is lost. Sequences in a round stay until it has ended.
        """
        moving = [sequence for sequence in window.idle if self.may_leave(sequence, window)]
        window.give_up(moving)
        return {sequence.sequence_id for sequence in moving}

    def remove(self, window: Window) -> None:
        """Remove a window that has no rounds in flight, and queue its sequences."""
        window.is_open = False
        self.windows.remove(window)
        window.give_up(list(window.members))
        window.released(set(window.leaving_ids))

    def wake(self) -> None:
        """Call after a change. Any window may have something to do."""
        for window in self.windows:
            window.wake()

    def without_grammars(self, window: Window) -> list[Sequence]:
        """Constrained sequences that cannot continue: this window does not follow grammars."""
        places = (window,) if self._follows_grammars else (window, None)
        return [s for s in self.in_flight if s.request.constraint and self.window_of(s) in places]

    def check_integrity(self) -> None:
        """Raise AssertionError if a sequence is lost, or the queue exceeds its limits."""
        super().check_integrity()
        reserve = sum(window.max_num_seqs for window in self.windows)
        max_waiting = self.limits.samples + min(reserve, self.limits.samples)
        capacity = sum(window.capacity + len(window.background) for window in self.windows)
        assert self.waiting.newcomers <= max_waiting + capacity, "the queue is exceeded"
