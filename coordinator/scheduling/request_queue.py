"""The requests in flight: the queue that all windows share, and the window of each running sequence. Pure.

Each target worker has a window. A sequence runs in one window at a time, and a preempted one may continue in another.
Only windows with the same numerics, which choose the same tokens, may serve one request.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Protocol, TypeVar

from coordinator.scheduling.capacity import DuplicateRequestError, PoolFullError, QueueLimits
from coordinator.scheduling.fair_queue import FairQueue
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence

# A cached prefix decides between windows unless their shares of used places differ by more than this.
MAX_IMBALANCE = 0.25


class Window(Protocol):
    """A window as the queue sees it; `coordinator.scheduling.pool.Pool` implements it."""

    max_num_seqs: int
    is_open: bool
    numerics: str
    follows_grammars: bool
    background: set[int]
    wake: Callable[[], None]

    @property
    def capacity(self) -> int: ...
    @property
    def occupied(self) -> int: ...
    @property
    def coming(self) -> int: ...
    @property
    def load(self) -> float: ...
    def fits(self, sequence: Sequence) -> bool: ...
    def count_fitting(self, waiting: Iterable[Sequence]) -> int: ...
    def prefix_length(self, sequence: Sequence) -> int: ...
    def hold_back(self, sequence: Sequence) -> None: ...
    def let_go(self, sequence: Sequence) -> None: ...
    def discard(self, sequence: Sequence) -> None: ...
    def cut_prefixes(self, source: Sequence) -> None: ...


W = TypeVar("W", bound=Window)


@dataclass
class _Request:
    """A request with unfinished samples."""

    samples: dict[int, Sequence]
    size: int
    """Number of samples, finished ones included."""
    numerics: str = ""
    """Numerics of the windows that may continue it. Empty until its first sample enters one."""
    source_window: Window | None = None
    """The window that its first sample entered last."""

    @property
    def has_begun(self) -> bool:
        """Whether any sample has tokens."""
        return len(self.samples) < self.size or any(sample.num_generated for sample in self.samples.values())


class RequestQueue:
    """Queues requests, and passes them on to windows. `QueueLimits` bounds the queue."""

    def __init__(self, limits: QueueLimits, by_length: bool = False) -> None:
        """`by_length`: admit equally long sequences of a client one after the other."""
        self.limits = limits
        self.waiting = FairQueue(by_length)
        self.preempted: dict[int, Sequence] = {}
        """Preempted sequences that are not queued yet: they still hold a slot, or are paused."""
        self.windows: list[Window] = []
        self._requests: dict[tuple[str, str], _Request] = {}
        self._window_of: dict[int, Window] = {}
        """Of the sequences that hold a place, by id."""

    @property
    def queued(self) -> int:
        return len(self.waiting)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the queued sequences."""
        return self.waiting.tokens

    @property
    def in_flight(self) -> list[Sequence]:
        """All unfinished sequences, queued or in a window."""
        return [sample for request in self._requests.values() for sample in request.samples.values()]

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is queued or preempted."""
        return not (self.waiting or self.preempted)

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
        """Queue the samples of a request, all or none. Raises PoolFullError, DuplicateRequestError."""
        new = list(samples)
        (key,) = {sample.request.key for sample in new}
        if key in self._requests:
            raise DuplicateRequestError(key)
        check, tokens = partial(self._check_limits, key[0], len(new)), sum(sample.prompt_length for sample in new)
        try:
            check(tokens, entering=0)
        except PoolFullError:  # counting the sequences that enter takes longer, so do it only if needed
            places = sum(window.capacity for window in self._usable_windows)
            waiting = list(islice(chain(self.waiting, new), places))
            entering = self._count_fitting(waiting)
            entering_tokens = sum(sample.prompt_length for sample in waiting[:entering])
            check(tokens - entering_tokens, entering=entering)
        self.waiting.add(new)
        self._requests[key] = _Request({sample.sequence_id: sample for sample in new}, len(new))

    def check(self, request: GenerationRequest) -> None:
        """Raise the errors of `submit` that do not depend on the prompt."""
        if request.key in self._requests:
            raise DuplicateRequestError(request.key)
        places = sum(window.capacity for window in self._usable_windows)
        entering = min(places, len(self.waiting) + request.n)
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
        """Whether a window may run a sequence: it chooses the tokens that the request has begun with."""
        request = self._requests[sequence.request.key]
        if sequence.request.constraint and not window.follows_grammars and self._follows_grammars:
            return False
        return request.numerics in ("", window.numerics) or not (request.has_begun or self._places_of(request))

    def may_leave(self, sequence: Sequence, window: Window) -> bool:
        """Whether another open window may continue a sequence of this window."""
        request = self._requests[sequence.request.key]
        is_bound = request.has_begun or any(place is not window for place in self._places_of(request))
        return any(
            (other.numerics == request.numerics or not is_bound)
            and (other.follows_grammars or not sequence.request.constraint)
            for other in self.windows
            if other.is_open and other is not window
        )

    @property
    def _follows_grammars(self) -> bool:
        return any(window.follows_grammars for window in self.windows)

    def _places_of(self, request: _Request) -> list[Window]:
        """The windows of the samples that hold a place."""
        return [window for i in request.samples if (window := self._window_of.get(i)) is not None]

    @staticmethod
    def choose(sequence: Sequence, windows: list[W]) -> W:
        """The best of some windows with room: the one with the longest cached prefix, or the least load."""
        if len(windows) == 1:
            return windows[0]
        least = min(window.load for window in windows)
        balanced = [window for window in windows if window.load <= least + MAX_IMBALANCE]
        return max(balanced, key=lambda window: (window.prefix_length(sequence), -window.load))

    def has_room_beside(self, window: Window, sequence: Sequence) -> bool:
        """Whether another open window has room for a waiting sequence."""
        return any(other.fits(sequence) for other in self.windows if other is not window and other.is_open)

    def enter(self, sequence: Sequence, window: Window) -> None:
        """Move a waiting sequence into a window."""
        self.waiting.enter(sequence)
        request = self._requests[sequence.request.key]
        request.numerics = window.numerics
        self._window_of[sequence.sequence_id] = window
        if sequence.sequence_id != sequence.first_sample_id:
            return
        request.source_window = window
        if sequence.is_preempted:  # other sequences may wait for the prefix that it had in another window
            for other in self.windows:
                if other is not window:
                    other.cut_prefixes(sequence)

    def has_source_beside(self, sequence: Sequence, window: Window) -> bool:
        """Whether the first sample of a request has entered another window last."""
        return self._requests[sequence.request.key].source_window not in (window, None)

    def release(self, sequence_id: int, goes_first: bool = False) -> None:
        """Free the place of a sequence. If it was preempted, queue it."""
        self._window_of.pop(sequence_id, None)
        self.waiting.leave(sequence_id)
        self.requeue(sequence_id, goes_first)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence out of its window. It keeps its place until `release`."""
        self.preempted[sequence.sequence_id] = sequence
        self.waiting.leave(sequence.sequence_id)

    def requeue(self, sequence_id: int, goes_first: bool = False) -> None:
        """Queue a preempted sequence once its reader has caught up and its slot is released.

        `goes_first`: before other requests of its client.
        """
        sequence = self.preempted.get(sequence_id)
        if sequence is not None and not sequence.paused and sequence_id not in self._window_of:
            del self.preempted[sequence_id]
            self.waiting.add([sequence], goes_first)

    def window_of(self, sequence: Sequence) -> Window | None:
        """The window in which a sequence holds a place."""
        return self._window_of.get(sequence.sequence_id)

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
        request = self._requests.get((client, request_id))
        return list(request.samples.values()) if request is not None else []

    def abort(self, sequence: Sequence) -> None:
        """End an unfinished sequence in any state. In a round, it leaves after the round."""
        request, sequence_id = self._requests.get(sequence.request.key), sequence.sequence_id
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

    def forget(self, sequence: Sequence) -> None:
        """Remove the sample from its request. After an abort, another request may already use the same id."""
        key = sequence.request.key
        request = self._requests.get(key)
        if request is None or request.samples.pop(sequence.sequence_id, None) is None:
            return
        if not request.samples:
            del self._requests[key]

    def change_numerics(self, window: Window, numerics: str) -> list[Sequence]:
        """Record that a window chooses tokens by other numerics. Return the sequences that cannot continue."""
        if window.numerics == numerics:
            return []
        window.numerics = numerics
        left = {other.numerics for other in self.windows}
        stranded: list[Sequence] = []
        for request in self._requests.values():
            places = self._places_of(request)
            is_inside = window in places
            if request.numerics in ("", numerics) or (request.numerics in left and not is_inside):
                continue
            if request.has_begun or (is_inside and any(place is not window for place in places)):
                stranded.extend(request.samples.values())
            else:
                request.numerics = numerics if is_inside else ""
        return stranded

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
        self.waiting.check_integrity()
        queued = {sequence.sequence_id for sequence in self.waiting}
        places = set(self._window_of)
        assert not queued & places, "a queued sequence holds a place"
        assert not queued & self.preempted.keys(), "a queued sequence is held back"
        for sequence in self.in_flight:
            assert sequence.sequence_id in queued | places | self.preempted.keys(), "a sequence is lost"
        reserve = sum(window.max_num_seqs for window in self.windows)
        max_waiting = self.limits.samples + min(reserve, self.limits.samples)
        capacity = sum(window.capacity + len(window.background) for window in self.windows)
        assert self.waiting.newcomers <= max_waiting + capacity, "the queue is exceeded"
