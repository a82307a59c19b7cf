"""A request in flight as its caller sees it: its samples, each with its pieces, its end and its timings."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from functools import cached_property

from coordinator.scheduling.sequence import Sequence
from coordinator.text import ShownText
from protocol.errors import WorkerFailedError
from protocol.sampling import TokenLogprobs


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


class Sample:
    """One sequence of a request."""

    def __init__(self, sequence: Sequence, index: int, arrived: float) -> None:
        self.sequence, self.index = sequence, index
        self.pieces: list[Piece] = []
        """The pieces published so far."""
        self._arrived = arrived
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._ended: float | None = None

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

    def admit(self) -> None:
        """Notes that the sequence entered the window."""
        self._admitted = time.monotonic()

    def add(self, piece: Piece) -> None:
        """Notes what was committed."""
        if piece.token_ids and self._first_token is None:
            self._first_token = time.monotonic()
        self.pieces.append(piece)

    def end(self) -> None:
        """Notes that nothing more will come."""
        self._ended = time.monotonic()


class Generation:
    """One request: iterate over the pieces of its samples, as they come, to the end of the last one."""

    def __init__(self, sequences: Iterable[Sequence], arrived: float) -> None:
        self.samples = [Sample(sequence, index, arrived) for index, sequence in enumerate(sequences)]
        self._events: asyncio.Queue[tuple[Sample, Piece | None] | WorkerFailedError] = asyncio.Queue()

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.samples[0].sequence.request.request_id

    async def pieces(self) -> AsyncIterator[tuple[Sample, Piece | None]]:
        """Each piece with its sample, as it is committed; None instead of a piece when the sample has ended.

        WorkerFailedError if the request had to be given up.
        """
        for _ in self.samples:
            while True:
                event = await self._events.get()
                if isinstance(event, WorkerFailedError):
                    raise event
                yield event
                if event[1] is None:
                    break

    async def finished(self) -> list[Sample]:
        """Waits for the end; returns all samples. WorkerFailedError."""
        async for _, piece in self.pieces():
            if piece is not None:
                _ = piece.text  # made piece by piece: all at once would hold up other requests
        return self.samples

    def publish(self, sample: Sample, piece: Piece) -> None:
        """Hands over committed tokens."""
        sample.add(piece)
        self._events.put_nowait((sample, piece))

    def end(self, sample: Sample, error: WorkerFailedError | None = None) -> None:
        """Ends a sample: no more pieces of it will come."""
        sample.end()
        self._events.put_nowait(error or (sample, None))
