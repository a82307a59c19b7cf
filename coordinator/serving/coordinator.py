"""The coordinator: queues requests, runs rounds, and delivers tokens to callers."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count

from coordinator.config.settings import CoordinatorSettings
from coordinator.lanes.lanes import Lanes
from coordinator.prompts.constraint_reader import ConstraintReader
from coordinator.prompts.description import TokenizerDescription
from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.recording.recorder import Recorder, recorder_of
from coordinator.requests.generation import Generation
from coordinator.requests.in_flight import Latencies, RequestsInFlight
from coordinator.requests.traces import Traces
from coordinator.rounds.running import Shared
from coordinator.scheduling.audits import SpareRoom
from coordinator.scheduling.cache_events import CacheEvents
from coordinator.scheduling.capacity import DuplicateRequestError, QueueLimitError, QueueLimits
from coordinator.scheduling.request_queue import RequestQueue
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from coordinator.scheduling.text import TextStream
from coordinator.serving.auditor import DEFAULT_SHARE, Auditor
from coordinator.workers.interface import MismatchError
from coordinator.workers.target_link import TargetLink
from specpool.drafting.sources import DraftSources
from specpool.protocol.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
    UnimplementedError,
)
from specpool.protocol.recordings import Header
from specpool.protocol.worker_info import WorkerInfo, readable_name
from specpool.rpc.observability.tracing import Tracer

log = logging.getLogger(__name__)

POLL_SECONDS = 0.01


class Coordinator:
    def __init__(
        self,
        settings: CoordinatorSettings,
        tracer: Tracer | None = None,
        new_pool: Callable[[int], TokenizerPool] = TokenizerPool,
    ) -> None:
        """`new_pool` takes the maximum number of waiting prompts of a client."""
        self.settings = settings
        self.started = time.monotonic()
        self.traces = Traces(tracer, lambda: self.served_model_name, settings.trace_prompts)
        self.tokenizers = new_pool(settings.usable_window + settings.queue_size)
        self.constraints = ConstraintReader(self.tokenizers)
        limits = QueueLimits(settings.queue_size, settings.queue_tokens, settings.max_requests_per_client)
        self.queue = RequestQueue(limits, by_length=settings.admission == "length")
        self.cache_events = CacheEvents() if settings.smg and settings.prefix_caching else None
        """Cached pages of all target workers, for the gateway."""
        self.in_flight = RequestsInFlight(Latencies() if settings.metrics_port is not None else None)
        room = SpareRoom(
            lambda: [lane.window for lane in self.lanes if lane.window.is_open],
            settings.max_batch_size,
            mixes_lengths=settings.policy == "ragged",
        )
        self.auditor = Auditor(room, self.generate, self._abort, lambda: self.audit_share)
        self.recorder: Recorder | None = recorder_of(settings)
        sources = DraftSources(settings.lookup_store_tokens)
        shared = Shared(
            settings, self.queue, self.in_flight, self.traces, sources, self.auditor.yield_room, self.cache_events
        )
        self.counters = shared.counters
        self.lanes = Lanes(shared, self.tokenizers)
        self._sequence_ids = count(1)

    @property
    def target(self) -> TargetLink:
        """The link to a target worker that serves rounds."""
        return self.lanes.first.link

    @property
    def model(self) -> WorkerInfo | None:
        """The model of all target workers. None until one was ready."""
        return self.target.info if any(lane.is_known for lane in self.lanes) else None

    @property
    def grammar_refusal(self) -> str | None:
        """Why no target worker follows grammars; None if one does. Known once one was ready."""
        refusals = [lane.link.grammar_refusal for lane in self.lanes if lane.is_known]
        return None if None in refusals else next(iter(refusals), None)

    @property
    def tokenizer(self) -> TokenizerDescription:
        """The target's tokenizer. Raises UnavailableError until the target worker was ready."""
        if self.model is None or self.target.tokenizer is None:
            raise UnavailableError(f"the target worker at {self.target.address} is not ready: {self.target.reason}")
        return self.target.tokenizer

    @property
    def max_model_len(self) -> int:
        """Maximum positions of a request. Raises UnavailableError until the target worker was ready."""
        _ = self.tokenizer
        return min(link.info.max_model_len for link in self.lanes.links if link.info is not None)

    @property
    def served_model_name(self) -> str:
        """The model's name for clients. Empty until the target worker was ready, unless it is set."""
        if self.settings.served_model_name is not None:
            return self.settings.served_model_name
        return readable_name(self.model.model) if self.model is not None else ""

    @property
    def audit_share(self) -> float:
        """Share of the answers to audit, 0 to 1."""
        if self.settings.audit_share is not None:
            return self.settings.audit_share
        return DEFAULT_SHARE if self.model is not None and self.model.bitwise else 0.0

    async def run(self) -> None:
        """Run rounds. Raises MismatchError if the target worker restarts with another model; never returns."""
        try:
            await self.lanes.run(self.auditor.run())
        except* MismatchError as group:
            raise group.exceptions[0] from None

    async def slots_released(self) -> None:
        """Wait until all sequences have ended and released their slots in the lanes that serve rounds."""
        lanes = [lane for lane in self.lanes if lane.is_ready]
        while not self.queue.is_empty or any(lane.is_releasing for lane in lanes):  # noqa: ASYNC110 - only at shutdown
            await asyncio.sleep(POLL_SECONDS)

    def check_queue(self, request: GenerationRequest) -> None:
        """Check a request against the queue before its prompt is tokenized.

        Raises AlreadyExistsError, QueueFullError, InvalidArgumentError.
        """
        limit = self.settings.max_requests_per_client
        if limit is not None and request.n > limit:
            refusal = f"{request.n} exceeds {limit}, the number of samples that one client may have in flight"
            raise InvalidArgumentError("sampling_params.n", refusal, limit=limit)
        with self._refusals(request):
            self.queue.check(request)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest, arrived: float) -> AsyncIterator[Generation]:
        """Context manager that runs a request. Leaving it early aborts the request.

        Raises QueueFullError, UnimplementedError, and AlreadyExistsError if the client has a request with this id in
        flight.
        """
        refusal = self.grammar_refusal
        if request.constraint and refusal is not None:  # the target worker was replaced since the request was read
            raise UnimplementedError(f"{request.constraint}: {refusal}")
        sequences = self._sequences(request)
        with self._refusals(request):
            self.queue.submit(sequences)
        generation = Generation(
            sequences, arrived, self.settings.stream_stall_seconds, pause=self.queue.pause, resume=self._resume
        )
        self.in_flight.add(generation)
        self.queue.wake()
        try:
            yield generation
        finally:
            for sequence in sequences:
                self._abort(sequence)
                self.auditor.offer(sequence)
                if self.recorder is not None and (model := self.model) is not None:
                    fingerprints = model.tokenizer_fingerprint, model.weights_fingerprint
                    self.recorder.offer(sequence, Header(self.served_model_name, *fingerprints))
            self.in_flight.discard(generation)
            log.debug("request finished: %s", generation)

    def abort(self, client: str, request_id: str) -> None:
        """End a client's own request. The caller gets the tokens so far. Raises NotFoundError."""
        sequences = self.queue.find(client, request_id)
        if not sequences:
            raise NotFoundError(f"request_id: no request {request_id!r} is in flight")
        for sequence in sequences:
            self._abort(sequence)

    async def close(self) -> None:
        await self.tokenizers.close()
        await self.lanes.close()
        if self.recorder is not None:
            await self.recorder.close()

    @contextmanager
    def _refusals(self, request: GenerationRequest) -> Iterator[None]:
        try:
            yield
        except DuplicateRequestError:
            raise AlreadyExistsError(f"request_id: {request.request_id!r} is in flight already") from None
        except QueueLimitError as error:
            raise QueueFullError(str(error), self.in_flight.seconds_until_free(error.places)) from None

    def _resume(self, sequence: Sequence) -> None:
        self.queue.resume(sequence)
        self.queue.wake()

    def _abort(self, sequence: Sequence) -> None:
        if sequence.finish is not None:
            return
        self.queue.abort(sequence)
        self.in_flight.aborted(sequence)
        self.queue.wake()

    def _sequences(self, request: GenerationRequest) -> list[Sequence]:
        """The samples of a request, each with its own seed."""
        detokenizer, prefix_caching = self.tokenizer.detokenizer, self.settings.prefix_caching
        sequences = [
            Sequence(
                next(self._sequence_ids),
                sample,
                TextStream(detokenizer(sample.prompt_ids, sample.skip_special_tokens), sample.stop),
                prefix_caching=prefix_caching,
            )
            for sample in request.samples()
        ]
        for sequence in sequences:
            sequence.first_sample_id = sequences[0].sequence_id
        return sequences
