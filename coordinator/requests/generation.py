"""A request in flight, as seen by its caller: samples with commits, timings and finish reasons.

A streaming caller sets the pace. A sample with too many unread tokens pauses, and an abandoned stream fails.
"""

import asyncio
import io
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import Sequence
from specpool.protocol.errors import ServiceError, StalledStreamError
from specpool.protocol.sampling import Logprobs

# A sample with more unread tokens pauses, until half of them are read.
MAX_UNREAD = 256
# Tokens whose log-probabilities are handed out before other tasks get a turn.
TOKENS_PER_TURN = 64
# Commits after which a caller that does not stream reads them. Waking it up for each one would delay rounds.
UNREAD_COMMITS = 64


@dataclass(frozen=True)
class Timings:
    """Seconds of each phase; 0 if it never began. `time_to_first_token_s` and `total_s` start at arrival."""

    queue_s: float
    prefill_s: float
    decode_s: float
    time_to_first_token_s: float
    total_s: float


class Sample:
    def __init__(self, sequence: Sequence, index: int, arrived: float) -> None:
        self.sequence, self.index = sequence, index
        self.unread = 0
        """Committed tokens that the caller has not read."""
        self.paused = False
        self.gap: float | None = None
        """Seconds between the last two commits with tokens; None after the first."""
        self._text = io.StringIO()
        self._logprobs = Logprobs(sequence.request.logprobs or 0)
        self._arrived = arrived
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._ended: float | None = None

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    @property
    def timings(self) -> Timings:
        ended = self._ended or time.monotonic()
        admitted = self._admitted or ended
        first_token = self._first_token
        return Timings(
            queue_s=admitted - self._arrived,
            prefill_s=(first_token or ended) - admitted,
            decode_s=ended - first_token if first_token else 0.0,
            time_to_first_token_s=first_token - self._arrived if first_token else 0.0,
            total_s=ended - self._arrived,
        )

    @property
    def seconds_per_token(self) -> float | None:
        """Mean seconds per token after the first. None without a second token."""
        tokens = self.sequence.num_generated
        return self.timings.decode_s / (tokens - 1) if tokens > 1 else None

    @property
    def text(self) -> str:
        """The text that the caller has read."""
        return self._text.getvalue()

    async def logprobs(self) -> AsyncIterator[Logprobs]:
        """Log-probabilities of all tokens that were read. Yields in chunks, so that other tasks get a turn."""
        for start in range(0, len(self._logprobs), TOKENS_PER_TURN):
            yield self._logprobs[start : start + TOKENS_PER_TURN]
            await asyncio.sleep(0)

    def admit(self) -> None:
        """Record that the sequence entered the window, possibly again after preemption."""
        self._admitted = self._admitted or time.monotonic()

    def add(self, commit: Commit) -> None:
        if commit.token_ids:
            now = time.monotonic()
            self.gap = now - self._last_token if self._last_token is not None else None
            self._first_token, self._last_token = self._first_token or now, now
        self.unread += len(commit.token_ids)

    def read(self, commit: Commit) -> None:
        """Keep the text and the log-probabilities of the next commit, packed: an answer may have 100,000 tokens."""
        self._text.write(commit.text)
        if commit.logprobs:
            self._logprobs.extend(commit.logprobs)

    def end(self) -> None:
        self._ended = time.monotonic()


class Generation:
    """One request. Yields the commits of its samples as they arrive."""

    def __init__(
        self,
        sequences: Iterable[Sequence],
        arrived: float,
        stall_seconds: float,
        *,
        pause: Callable[[Sequence], None],
        resume: Callable[[Sequence], None],
    ) -> None:
        """`stall_seconds`: time without a read after which a stream fails."""
        self.samples = [Sample(sequence, index, arrived) for index, sequence in enumerate(sequences)]
        self._events: deque[tuple[Sample, Commit | None] | ServiceError] = deque()
        self._readable = asyncio.Event()
        """Set when the caller should read the events."""
        self._stall_seconds, self._pause, self._resume = stall_seconds, pause, resume
        self._fail: Callable[[ServiceError], None] | None = None
        """Fails the call. Set only while commits are streamed."""
        self._stall: asyncio.TimerHandle | None = None
        """Timer that runs while the reader blocks a paused sample, or the memory of finished samples."""
        self._last_read = 0.0

    def __str__(self) -> str:
        """Finish reasons, token counts and duration, for the log."""
        sequences = [sample.sequence for sample in self.samples]
        reasons = [str(sequence.finish.reason) if sequence.finish else "unfinished" for sequence in sequences]
        generated = sum(sequence.num_generated for sequence in sequences)
        seconds = max(sample.timings.total_s for sample in self.samples)
        return f"{', '.join(reasons)}; {sequences[0].prompt_length} + {generated} tokens in {seconds:.3f} s"

    @property
    def request_id(self) -> str:
        return self.samples[0].sequence.request.request_id

    @property
    def is_background(self) -> bool:
        return self.samples[0].sequence.request.is_background

    @property
    def _has_ended(self) -> bool:
        return all(sample.has_ended for sample in self.samples)

    async def stream(self, fail: Callable[[ServiceError], None]) -> AsyncIterator[tuple[Sample, Commit | None]]:
        """Yield each commit with its sample, at the pace of the caller. None marks the end of a sample.

        `fail` is called if the caller stops reading, and must end the call. Raises the error of a failed request.
        """
        self._fail = fail
        try:
            async for sample, commit in self._all_commits():
                self._note_read(sample, commit)
                yield sample, commit
        finally:
            self._fail = None
            self._update_stall_timer()

    async def finished(self) -> list[Sample]:
        """Wait for the end, and return all samples. Raises the error of a failed request."""
        async for _ in self._all_commits():
            pass
        return self.samples

    async def _all_commits(self) -> AsyncIterator[tuple[Sample, Commit | None]]:
        unfinished = len(self.samples)
        while unfinished:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, ServiceError):
                    raise event
                sample, commit = event
                if commit is not None:
                    sample.read(commit)
                else:
                    unfinished -= 1
                yield event
            self._readable.clear()
            if unfinished:
                await self._readable.wait()

    def publish(self, sample: Sample, commit: Commit) -> None:
        sample.add(commit)
        self._events.append((sample, commit))
        is_streamed = self._fail is not None
        if is_streamed or len(self._events) >= UNREAD_COMMITS:
            self._readable.set()
        if is_streamed and sample.unread > MAX_UNREAD and not sample.paused:
            sample.paused = True
            self._pause(sample.sequence)
            self._update_stall_timer()

    def end(self, sample: Sample, error: ServiceError | None = None) -> None:
        sample.end()
        self._events.append(error or (sample, None))
        self._readable.set()
        self._update_stall_timer()

    def _note_read(self, sample: Sample, commit: Commit | None) -> None:
        sample.unread -= len(commit.token_ids) if commit is not None else 0
        self._last_read = time.monotonic()
        if sample.paused and sample.unread <= MAX_UNREAD // 2:
            sample.paused = False
            self._resume(sample.sequence)
            self._update_stall_timer()

    def _update_stall_timer(self) -> None:
        is_blocked = any(sample.paused and not sample.has_ended for sample in self.samples) or self._has_ended
        if self._fail is None or not is_blocked:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None
        elif self._stall is None:
            self._start_timer(self._stall_seconds)

    def _start_timer(self, seconds: float) -> None:
        self._stall = asyncio.get_running_loop().call_later(seconds, self._timed_out)

    def _timed_out(self) -> None:
        """Fail the stream, unless all samples have ended and the caller is still reading."""
        unread_for = time.monotonic() - self._last_read
        if self._has_ended and unread_for < self._stall_seconds:
            self._start_timer(self._stall_seconds - unread_for)
        elif self._fail is not None:
            self._fail(StalledStreamError(f"the stream was not read for {self._stall_seconds:g} s"))
