"""A request in flight as its caller sees it: its samples, each with its pieces, its end and its timings.

A caller that streams sets the pace: a sample with too many unread tokens pauses, and a stream that nobody reads is
ended.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.text import ShownText
from specpool.protocol.errors import ServiceError, StalledStreamError
from specpool.protocol.sampling import TokenLogprobs

# Unread tokens of a sample beyond which it pauses; it goes on when half of them are read.
MOST_UNREAD = 256
# Pieces whose log-probabilities are handed out between two turns of the event loop.
PIECES_AT_ONCE = 64


@dataclass(frozen=True)
class Timings:
    """Seconds; 0 for what did not happen. `first_token` and `total` are since the arrival of the request."""

    queue: float
    prefill: float
    decode: float
    first_token: float
    total: float


@dataclass(frozen=True)
class Piece:
    """Tokens that a round committed; log-probabilities if they were asked for."""

    token_ids: tuple[int, ...]
    shown: ShownText
    logprobs: tuple[TokenLogprobs, ...] = ()

    @cached_property
    def text(self) -> str:
        """The text that can be shown now, made here so that no round waits. Read it in the order of the pieces."""
        return self.shown()


class Pace(Protocol):
    """Takes in how fast a stream is read; `coordinator.serving.coordinator.Coordinator` does."""

    def pause(self, sequence: Sequence) -> None:
        """The reader lags behind."""

    def resume(self, sequence: Sequence) -> None:
        """The reader has caught up."""


class Sample:
    """One sequence of a request."""

    def __init__(self, sequence: Sequence, index: int, arrived: float) -> None:
        self.sequence, self.index = sequence, index
        self.pieces: list[Piece] = []
        """The pieces published so far."""
        self.unread = 0
        """Tokens published and not read yet."""
        self.paused = False
        self.gap: float | None = None
        """Seconds between the last piece with tokens and the one before it; None for the first."""
        self._arrived = arrived
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._ended: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._ended is not None

    @property
    def timings(self) -> Timings:
        """The seconds of each phase until now."""
        ended = self._ended or time.monotonic()
        admitted = self._admitted or ended
        first_token = self._first_token
        return Timings(
            queue=admitted - self._arrived,
            prefill=(first_token or ended) - admitted,
            decode=ended - first_token if first_token else 0.0,
            first_token=first_token - self._arrived if first_token else 0.0,
            total=ended - self._arrived,
        )

    async def logprobs(self) -> AsyncIterator[list[TokenLogprobs]]:
        """Log-probabilities of the tokens so far, in parts, so that no long answer holds up other requests; nothing if
        they were not asked for."""
        if self.sequence.request.logprobs is None:
            return
        for start in range(0, len(self.pieces), PIECES_AT_ONCE):
            pieces = self.pieces[start : start + PIECES_AT_ONCE]
            yield [logprobs for piece in pieces for logprobs in piece.logprobs]
            await asyncio.sleep(0)

    def admit(self) -> None:
        """Notes that the sequence entered the window; again if it was set aside meanwhile."""
        self._admitted = self._admitted or time.monotonic()

    def add(self, piece: Piece) -> None:
        """Notes what was committed."""
        if piece.token_ids:
            now = time.monotonic()
            self.gap = now - self._last_token if self._last_token is not None else None
            self._first_token, self._last_token = self._first_token or now, now
        self.pieces.append(piece)
        self.unread += len(piece.token_ids)

    def end(self) -> None:
        """Notes that nothing more will come."""
        self._ended = time.monotonic()


class Generation:
    """One request: iterate over the pieces of its samples, as they come, to the end of the last one."""

    def __init__(self, sequences: Iterable[Sequence], arrived: float, pace: Pace, stall_seconds: float) -> None:
        """`stall_seconds`: time after which a stream that is not read is given up."""
        self.samples = [Sample(sequence, index, arrived) for index, sequence in enumerate(sequences)]
        self._events: asyncio.Queue[tuple[Sample, Piece | None] | ServiceError] = asyncio.Queue()
        self._pace, self._stall_seconds = pace, stall_seconds
        self._give_up: Callable[[ServiceError], None] | None = None
        """Set while the pieces are streamed."""
        self._stall: asyncio.TimerHandle | None = None
        """Runs while the reader holds something up: a sample that is paused, or the memory of samples that have
        ended."""
        self._last_read = 0.0

    def __str__(self) -> str:
        """Finish reasons, token counts and duration, for the log."""
        sequences = [sample.sequence for sample in self.samples]
        reasons = [str(sequence.finish.reason) if sequence.finish else "unfinished" for sequence in sequences]
        generated = sum(sequence.num_generated for sequence in sequences)
        seconds = max(sample.timings.total for sample in self.samples)
        return f"{', '.join(reasons)}; {sequences[0].prompt_length} + {generated} tokens in {seconds:.3f} s"

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.samples[0].sequence.request.request_id

    @property
    def _has_ended(self) -> bool:
        return all(sample.has_ended for sample in self.samples)

    async def pieces(self, give_up: Callable[[ServiceError], None]) -> AsyncIterator[tuple[Sample, Piece | None]]:
        """Each piece with its sample, at the pace of the caller; None instead of a piece when the sample has ended.

        `give_up` is called if the caller stops reading, and must end the call. Raises the error of a request that had
        to be given up.
        """
        self._give_up = give_up
        try:
            async for sample, piece in self._all_pieces():
                self._note_read(sample, piece)
                yield sample, piece
        finally:
            self._give_up = None
            self._watch()

    async def finished(self) -> list[Sample]:
        """Waits for the end; returns all samples. Raises the error of a request that had to be given up."""
        async for _, piece in self._all_pieces():
            if piece is not None:
                _ = piece.text  # made piece by piece: all at once would hold up other requests
        return self.samples

    async def _all_pieces(self) -> AsyncIterator[tuple[Sample, Piece | None]]:
        for _ in self.samples:
            while True:
                event = await self._events.get()
                if isinstance(event, ServiceError):
                    raise event
                yield event
                if event[1] is None:
                    break

    def publish(self, sample: Sample, piece: Piece) -> None:
        """Hands over committed tokens."""
        sample.add(piece)
        self._events.put_nowait((sample, piece))
        if self._give_up is not None and sample.unread > MOST_UNREAD and not sample.paused:
            sample.paused = True
            self._pace.pause(sample.sequence)
            self._watch()

    def end(self, sample: Sample, error: ServiceError | None = None) -> None:
        """Ends a sample: no more pieces of it will come."""
        sample.end()
        self._events.put_nowait(error or (sample, None))
        self._watch()

    def _note_read(self, sample: Sample, piece: Piece | None) -> None:
        sample.unread -= len(piece.token_ids) if piece is not None else 0
        self._last_read = time.monotonic()
        if sample.paused and sample.unread <= MOST_UNREAD // 2:
            sample.paused = False
            self._pace.resume(sample.sequence)
            self._watch()

    def _watch(self) -> None:
        """Starts the clock while the reader holds something up, and stops it otherwise."""
        waited_for = any(sample.paused and not sample.has_ended for sample in self.samples) or self._has_ended
        if self._give_up is None or not waited_for:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None
        elif self._stall is None:
            self._start_clock(self._stall_seconds)

    def _start_clock(self, seconds: float) -> None:
        self._stall = asyncio.get_running_loop().call_later(seconds, self._clock_ran_out)

    def _clock_ran_out(self) -> None:
        """Gives the stream up, unless the samples have ended and their last pieces are being read."""
        unread_for = time.monotonic() - self._last_read
        if self._has_ended and unread_for < self._stall_seconds:
            self._start_clock(self._stall_seconds - unread_for)
        elif self._give_up is not None:
            self._give_up(StalledStreamError(f"the stream was not read for {self._stall_seconds:g} s"))
