"""The coordinator: takes requests, lets the round loop generate them, and hands every caller its own tokens."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from coordinator.grouping import POLICIES, GroupingLimits
from coordinator.pool import DuplicateRequestError, Pool, PoolFullError
from coordinator.round import Commit
from coordinator.rounds import RoundLoop
from coordinator.sequence import Finish, FinishReason, GenerationRequest, Sequence, TokenLogprobs
from coordinator.settings import CoordinatorSettings
from coordinator.text import TextStream
from coordinator.tokenizer import TargetTokenizer
from coordinator.workers import DraftLink, MismatchError, TargetLink
from rpc.errors import AlreadyExistsError, NotFoundError, QueueFullError, UnavailableError, WorkerFailedError

# Asking again sooner would meet the same queue.
RETRY_AFTER_SECONDS = 1.0
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Timings:
    """Seconds since the arrival of a request; None for what did not happen."""

    queue: float | None
    first_token: float | None
    total: float


@dataclass(frozen=True)
class Piece:
    """Tokens that a round committed, and the text that can be shown now; log-probabilities if they were asked for."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class Generation:
    """One request as its caller sees it: iterate over its pieces until `finish` is set."""

    def __init__(self, sequence: Sequence, arrived: float) -> None:
        self.sequence = sequence
        self._pieces: asyncio.Queue[Piece | WorkerFailedError | None] = asyncio.Queue()
        self._arrived = arrived
        self._admitted: float | None = None
        self._first_token: float | None = None

    @property
    def finish(self) -> Finish | None:
        """How it ended, once it has."""
        return self.sequence.finish

    @property
    def timings(self) -> Timings:
        """Where the time went until now."""
        queue = self._admitted - self._arrived if self._admitted is not None else None
        first = self._first_token - self._arrived if self._first_token is not None else None
        return Timings(queue, first, time.monotonic() - self._arrived)

    async def pieces(self) -> AsyncIterator[Piece]:
        """What is committed, as it comes, to the end. WorkerFailedError if the request had to be given up."""
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, WorkerFailedError):
                raise piece
            yield piece

    def admitted(self) -> None:
        """Notes that the sequence entered the window."""
        self._admitted = time.monotonic()

    def publish(self, piece: Piece) -> None:
        """Hands over committed tokens."""
        if self._first_token is None:
            self._first_token = time.monotonic()
        self._pieces.put_nowait(piece)

    def end(self, error: WorkerFailedError | None = None) -> None:
        """No more pieces will come."""
        self._pieces.put_nowait(error)


class Coordinator:
    """Joins the pool, the round loop and the links to the workers."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        # Unique to this process, so that no worker takes its sequences for those of an earlier one.
        coordinator_id = uuid.uuid4().hex
        self.target = TargetLink(settings.target_address, coordinator_id, settings.target_timeout_seconds)
        self.draft: DraftLink | None = None
        if settings.draft_address is not None:
            self.draft = DraftLink(settings.draft_address, coordinator_id, settings.draft_timeout_seconds, self.target)
        self.pool = Pool(settings.window_size, settings.queue_size, by_length=settings.admission == "length")
        self.finished: Counter[str] = Counter()
        self.requests = 0
        self.started = time.monotonic()
        self._sequence_ids = count(1)
        self._generations: dict[int, Generation] = {}
        self._tokenizer: TargetTokenizer | None = None
        limits = GroupingLimits(
            settings.max_batch_size, settings.least_group_size, settings.max_wait_rounds, settings.prefer_group
        )
        self._loop = RoundLoop(
            self.pool,
            POLICIES[settings.policy](limits),
            self.target,
            self.draft,
            settings.prefill_tokens,
            self._publish,
            self._admitted,
            self._fail,
        )
        self.counters = self._loop.counters

    @property
    def tokenizer(self) -> TargetTokenizer:
        """The target's tokenizer. UnavailableError until the target worker was reached for the first time."""
        if self._tokenizer is None:
            if self.target.tokenizer is None:
                raise UnavailableError(f"the target worker at {self.target.address} is not ready: {self.target.reason}")
            self._tokenizer = TargetTokenizer(self.target.tokenizer)
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Positions that a request can have. UnavailableError until the target worker was reached."""
        _ = self.tokenizer
        return self.target.max_model_len

    async def run(self) -> None:
        """Serves for ever. MismatchError if the target worker comes back with another model."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for link in self._links():
                    tasks.create_task(link.keep_connected())
                tasks.create_task(self._loop.release_leavers())
                await self._loop.run()
        except* MismatchError as group:
            raise group.exceptions[0] from None

    def fit_window(self) -> None:
        """Call when the target is ready: more sequences than its slots would only take turns in rebuilding caches."""
        self.pool.window_size = min(self.settings.window_size, self.target.slots_total)

    async def slots_released(self) -> None:
        """Returns when nothing is generated and the workers were told of all that left."""
        while not self.pool.is_empty:  # noqa: ASYNC110 - once, at the end; not worth an event
            await asyncio.sleep(POLL_SECONDS)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest, arrived: float) -> AsyncIterator[Generation]:
        """A generation under way; leaving the context early ends it and frees its slots.

        AlreadyExistsError for a request id in flight, QueueFullError.
        """
        text = TextStream(self.tokenizer.detokenizer(), request.stop)
        sequence = Sequence(next(self._sequence_ids), request, text)
        try:
            self.pool.submit(sequence)
        except DuplicateRequestError:
            raise AlreadyExistsError(f"request_id: {request.request_id!r} is in flight already") from None
        except PoolFullError:
            waiting = f"the queue is full ({self.pool.queued} requests wait)"
            raise QueueFullError(waiting, RETRY_AFTER_SECONDS) from None
        self.requests += 1
        generation = self._generations[sequence.sequence_id] = Generation(sequence, arrived)
        self._loop.wake()
        try:
            yield generation
        finally:
            self._abort(sequence)
            del self._generations[sequence.sequence_id]

    def abort(self, request_id: str) -> None:
        """Ends a request in flight: its caller gets what there is. NotFoundError."""
        sequence = self.pool.find(request_id)
        if sequence is None:
            raise NotFoundError(f"request_id: no request {request_id!r} is in flight")
        self._abort(sequence)

    async def close(self) -> None:
        """Closes the connections."""
        for link in self._links():
            await link.close()

    def _links(self) -> list[TargetLink | DraftLink]:
        return [self.target, *([self.draft] if self.draft is not None else [])]

    def _abort(self, sequence: Sequence) -> None:
        if sequence.finish is not None:
            return
        self.pool.abort(sequence)
        generation = self._generations.get(sequence.sequence_id)
        if generation is not None and sequence.text is not None and (rest := sequence.text.flush()):
            generation.publish(Piece((), rest))
        self._end(sequence, FinishReason.ABORT)
        self._loop.wake()

    def _admitted(self, sequence: Sequence) -> None:
        self._generations[sequence.sequence_id].admitted()

    def _publish(self, commit: Commit) -> None:
        generation = self._generations.get(commit.sequence.sequence_id)
        if generation is None:
            return
        generation.publish(Piece(commit.token_ids, commit.text, commit.logprobs))
        if commit.sequence.finish is not None:
            self._end(commit.sequence, commit.sequence.finish.reason)

    def _fail(self, sequence: Sequence, reason: str) -> None:
        if sequence.finish is not None:
            return
        self.pool.abort(sequence)
        self._end(sequence, "error", WorkerFailedError(reason))

    def _end(self, sequence: Sequence, how: str, error: WorkerFailedError | None = None) -> None:
        self.finished[how] += 1
        if (generation := self._generations.get(sequence.sequence_id)) is not None:
            generation.end(error)
