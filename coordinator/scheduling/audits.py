"""Answers to audit: their replay by plain decoding, the first difference from it, and when there is room. Pure."""

from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import zip_longest

from coordinator.scheduling.sequence import FinishReason, GenerationRequest, Sequence
from coordinator.scheduling.window import Window

AUDIT_CLIENT = "audit"
"""The client of all replays. No caller has this name: callers' names have a prefix."""
# Maximum answers that wait for their audit, and the bytes of their tokens and grammars.
MAX_ANSWERS, MAX_BYTES = 64, 4 * 2**20

# Share of places and pages that must remain free once a background sequence has entered.
ENTRY_SHARE = 4
# Share of the pages that must stay free.
STAY_SHARE = 16
# In a smaller window, or with a policy that groups by length, a background sequence only runs alone.
MIN_SHARED_PLACES = 4


@dataclass(frozen=True)
class Answer:
    """The tokens that a sample got, packed, and all that they depend on."""

    request: GenerationRequest
    """The request without prompt and prediction."""
    prompt_ids: "array[int]"
    token_ids: "array[int]"

    @classmethod
    def of(cls, sequence: Sequence) -> "Answer | None":
        """The answer of a sequence; None unless it finished by itself."""
        if sequence.finish is None or sequence.finish.reason is FinishReason.ABORT:
            return None
        request = sequence.request
        without_tokens = replace(request, prompt_ids=(), prediction=())
        return cls(without_tokens, array("I", request.prompt_ids), array("I", sequence.generated_ids))

    @property
    def num_bytes(self) -> int:
        return self.max_length * self.token_ids.itemsize + len(self.request.sampling.grammar)

    @property
    def max_length(self) -> int:
        """Maximum positions of the replay."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def replay(self) -> GenerationRequest:
        """The same request by plain decoding, with the two largest log-probabilities of each position."""
        return replace(
            self.request,
            request_id=f"audit of {self.request.request_id}",
            prompt_ids=tuple(self.prompt_ids),
            max_tokens=len(self.token_ids),  # a replay that differs need not continue
            num_speculative_tokens=0,
            adaptive=False,
            logprobs=2,
            priority=0,
            cache_salt="",
            client=AUDIT_CLIENT,
            is_background=True,
        )


@dataclass(frozen=True)
class Difference:
    """The first generated token that differs from plain decoding. None: the tokens ended before."""

    position: int
    """From 0, the first generated token."""
    token_id: int | None
    plain_token_id: int | None


def first_difference(token_ids: Items[int], plain_ids: Items[int]) -> Difference | None:
    """Compare the tokens of an answer with those of plain decoding. None: they are equal."""
    pairs = enumerate(zip_longest(token_ids, plain_ids))
    return next((Difference(i, token, plain) for i, (token, plain) in pairs if token != plain), None)


class Backlog:
    """Answers that wait for their audit, within limits on their number and memory."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES) -> None:
        self._max_answers, self._max_bytes = max_answers, max_bytes
        self._answers: deque[Answer] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def first(self) -> Answer:
        return self._answers[0]

    def add(self, answer: Answer) -> int:
        """Add an answer. Return how many were dropped: the oldest ones, or this one if it is too large."""
        if answer.num_bytes > self._max_bytes:
            return 1
        self._answers.append(answer)
        self._num_bytes += answer.num_bytes
        dropped = 0
        while len(self) > self._max_answers or self._num_bytes > self._max_bytes:
            self.pop()
            dropped += 1
        return dropped

    def pop(self) -> Answer:
        """Remove and return the oldest answer."""
        answer = self._answers.popleft()
        self._num_bytes -= answer.num_bytes
        return answer

    def clear(self) -> int:
        """Drop all answers. Return how many there were."""
        dropped, self._num_bytes = len(self), 0
        self._answers.clear()
        return dropped


@dataclass(frozen=True)
class SpareRoom:
    """Unused capacity in the windows of the target workers.

    A background sequence enters while no request waits and much of a window is free, and leaves as soon as little is
    left. The gap between the two limits keeps it from starting in vain.
    """

    windows: Callable[[], list[Window]]
    """The open windows."""
    max_batch_size: int
    mixes_lengths: bool
    """Whether the policy batches sequences of all lengths, so that a background sequence needs no rounds of its own."""

    def may_enter(self, length: int) -> bool:
        """Whether a background sequence of at most `length` positions may enter."""
        windows = self.windows()
        if any(window.background for window in windows):
            return False
        return any(self._has_room(window, length) for window in windows)

    def may_stay(self) -> bool:
        """Whether the background sequence, waiting or in a window, leaves room for the next request."""
        windows = self.windows()
        return any(map(self._has_room_left, [window for window in windows if window.background] or windows))

    def _has_room(self, window: Window, length: int) -> bool:
        held = window.pages
        if window.queued:
            return False
        if not self._is_shared(window):
            return not window.occupied
        if min(window.capacity, self.max_batch_size - window.running) <= window.max_num_seqs // ENTRY_SHARE:
            return False
        needed = held.capacity.pages_for(length)
        return not held.is_limited or needed <= held.free - held.capacity.pages // ENTRY_SHARE

    def _has_room_left(self, window: Window) -> bool:
        held = window.pages
        if not self._is_shared(window):
            return window.occupied + window.queued <= 1
        if window.capacity <= window.queued or window.running > self.max_batch_size:
            return False
        has_pages = not held.is_limited or held.free > held.capacity.pages // STAY_SHARE
        return has_pages and not window.cramped and (not window.queued or bool(window.entering))

    def _is_shared(self, window: Window) -> bool:
        return self.mixes_lengths and window.max_num_seqs >= MIN_SHARED_PLACES
