"""The coordinator: queues requests, runs rounds, and delivers tokens to callers."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count

from coordinator.audit.spare_room import SpareRoom
from coordinator.config.settings import CoordinatorSettings
from coordinator.drafting.drafting import Drafting
from coordinator.prompts.constraint_reader import ConstraintReader
from coordinator.prompts.description import TokenizerDescription
from coordinator.prompts.template_file import read_template
from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.requests.generation import Generation
from coordinator.requests.in_flight import RequestsInFlight
from coordinator.requests.latencies import Latencies
from coordinator.rounds.loop import RoundLoop
from coordinator.rounds.runner import RoundRunner
from coordinator.scheduling.capacity import DuplicateRequestError, KVCapacity, PoolFullError, QueueLimits
from coordinator.scheduling.grouping import POLICIES, GroupingLimits
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.sequence import GenerationRequest, Prefix, Sequence
from coordinator.scheduling.text import TextStream
from coordinator.serving.auditor import DEFAULT_SHARE, Auditor
from coordinator.tracing.traces import Traces
from coordinator.workers.discovery import Discovery, Endpoint
from coordinator.workers.draft_group import DraftGroup
from coordinator.workers.draft_link import DraftLink
from coordinator.workers.errors import MismatchError
from coordinator.workers.interface import Workers
from coordinator.workers.standby import TargetPair
from coordinator.workers.target_link import TargetLink
from coordinator.workers.target_model import TargetModel
from specpool.protocol.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
    UnimplementedError,
)
from specpool.protocol.model_name import readable_name
from specpool.rpc.observability.tracing import Tracer
from specpool.rpc.security.channel import Connector
from specpool.v1 import common_pb2

log = logging.getLogger(__name__)

POLL_SECONDS = 0.01


class Coordinator:
    """Combines the pool, the round loop and the worker links."""

    def __init__(self, settings: CoordinatorSettings, tracer: Tracer | None = None) -> None:
        self.settings = settings
        self.started = time.monotonic()
        self.traces = Traces(tracer, lambda: self.served_model_name, settings.trace_prompts)
        # Unique to this process, so that no worker confuses its sequences with those of an earlier one.
        coordinator_id = uuid.uuid4().hex
        self.tokenizers = TokenizerPool(max_waiting=settings.usable_window + settings.queue_size)
        self.constraints = ConstraintReader(self.tokenizers)
        addresses, model = [settings.target_address, settings.target_standby_address], TargetModel()
        self.targets = TargetPair(*(self._target_link(each, coordinator_id, model) for each in addresses if each))
        self.draft: DraftGroup | None = None
        if settings.draft_addresses:
            open_link = partial(self._draft_link, coordinator_id=coordinator_id)
            self.draft = DraftGroup(Discovery(settings.draft_addresses), open_link)
        is_eqspec = settings.policy == "eqspec"  # a fixed batch neither preempts nor overlaps
        self.pool = Pool(
            settings.usable_window,
            QueueLimits(settings.queue_size, settings.queue_tokens, settings.max_requests_per_client),
            by_length=settings.admission == "length",
            prefix_caching=settings.prefix_caching,
            preempts=not is_eqspec,
        )
        self.in_flight = RequestsInFlight(Latencies() if settings.metrics_port is not None else None)
        self.drafting = Drafting(settings.max_num_speculative_tokens, lookup_store_tokens=settings.lookup_store_tokens)
        runner = RoundRunner(
            self.pool,
            Workers(self.targets, self.draft),
            self.drafting,
            self.in_flight,
            self.traces,
            prefill_tokens=settings.prefill_tokens,
            overlap="off" if is_eqspec else settings.overlap,
            runs_ahead=POLICIES[settings.policy].runs_ahead,
        )
        self.counters = runner.counters
        limits = GroupingLimits(
            settings.max_batch_size, settings.default_group_size, settings.max_wait_rounds, settings.prefer_group
        )
        self._loop = RoundLoop(self.pool, POLICIES[settings.policy](limits), runner, self.in_flight)
        for link in self.targets.links:
            link.on_replaced = self._target_replaced
        room = SpareRoom(self.pool, settings.max_batch_size, mixes_lengths=settings.policy == "ragged")
        self.auditor = Auditor(room, self.generate, self._abort, lambda: self.audit_share)
        self._loop.on_admission = self.auditor.yield_room
        self._sequence_ids = count(1)

    @property
    def target(self) -> TargetLink:
        """The link to the target worker that serves rounds."""
        return self.targets.active

    @property
    def tokenizer(self) -> TokenizerDescription:
        """The target's tokenizer. Raises UnavailableError until the target worker was ready."""
        if self.target.tokenizer is None:
            raise UnavailableError(f"the target worker at {self.target.address} is not ready: {self.target.reason}")
        return self.target.tokenizer

    @property
    def max_model_len(self) -> int:
        """Maximum positions of a request. Raises UnavailableError until the target worker was ready."""
        _ = self.tokenizer
        return self.targets.max_model_len

    @property
    def served_model_name(self) -> str:
        """The model's name for clients. Empty until the target worker was ready, unless it is set."""
        if self.settings.served_model_name is not None:
            return self.settings.served_model_name
        return readable_name(self.target.info.model) if self.target.info is not None else ""

    @property
    def audit_share(self) -> float:
        """Share of the answers to audit, 0 to 1."""
        if self.settings.audit_share is not None:
            return self.settings.audit_share
        info = self.target.info
        is_exact = info is not None and info.equivalence == common_pb2.EQUIVALENCE_BITWISE
        return DEFAULT_SHARE if is_exact else 0.0

    async def run(self) -> None:
        """Run rounds. Raises MismatchError if the target worker restarts with another model; never returns."""
        try:
            async with asyncio.TaskGroup() as tasks:
                drafts = [] if self.draft is None else [self.draft.keep_connected()]
                for probing in (*self.targets.probes(), *drafts):
                    tasks.create_task(probing)
                tasks.create_task(self.auditor.run())
                await self._loop.run()
        except* MismatchError as group:
            raise group.exceptions[0] from None

    def fit_window(self) -> None:
        """Limit the window to the target's slots, once it is ready. More sequences would only evict each other."""
        load = self.target.load_at_start
        self.pool.slots = load.slots_total
        self.pool.max_num_seqs = min(self.settings.usable_window, self.pool.slots)
        grows = load.kv_reservations_grow and self.settings.policy != "eqspec"  # a fixed batch does not preempt
        self.pool.reservations.capacity = KVCapacity(load.kv_positions_total, load.kv_positions_multiple, grows)

    async def slots_released(self) -> None:
        """Wait until all sequences have ended and released their slots."""
        while not self.pool.is_empty or (self.draft is not None and self.draft.is_releasing):  # noqa: ASYNC110 - only at shutdown
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
            self.pool.check(request)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest, arrived: float) -> AsyncIterator[Generation]:
        """Context manager that runs a request. Leaving it early aborts the request.

        Raises QueueFullError, UnimplementedError, and AlreadyExistsError if the client has a request with this id in
        flight.
        """
        refusal = self.targets.grammar_refusal
        if request.constraint and refusal is not None:  # the target worker was replaced since the request was read
            raise UnimplementedError(f"{request.constraint}: {refusal}")
        sequences = self._sequences(request)
        with self._refusals(request):
            self.pool.submit(sequences)
        generation = Generation(
            sequences,
            arrived,
            self.settings.stream_stall_seconds,
            pause=self.pool.pause,
            resume=self._resume,
        )
        self.in_flight.add(generation)
        self._loop.wake()
        try:
            yield generation
        finally:
            for sequence in sequences:
                self._abort(sequence)
                self.auditor.offer(sequence)
            self.in_flight.discard(generation)
            log.debug("request finished: %s", generation)

    def abort(self, client: str, request_id: str) -> None:
        """End a client's own request. The caller gets the tokens so far. Raises NotFoundError."""
        sequences = self.pool.find(client, request_id)
        if not sequences:
            raise NotFoundError(f"request_id: no request {request_id!r} is in flight")
        for sequence in sequences:
            self._abort(sequence)

    async def close(self) -> None:
        await self.tokenizers.close()
        for link in self.targets.links:
            await link.close()
        if self.draft is not None:
            await self.draft.close()

    def _target_link(self, address: str, coordinator_id: str, model: TargetModel) -> TargetLink:
        settings = self.settings
        connector = Connector(address, **settings.worker_security)
        link = TargetLink(connector, coordinator_id, settings.target_timeout_seconds, self.tokenizers, model)
        if settings.chat_template is not None:
            link.chat_template = read_template(settings.chat_template)
        return link

    def _draft_link(self, endpoint: Endpoint, coordinator_id: str) -> DraftLink:
        connector = Connector(endpoint.address, **endpoint.secured(self.settings.worker_security))
        return DraftLink(connector, coordinator_id, self.settings.draft_timeout_seconds, self.targets)

    def _target_replaced(self, is_same_model: bool) -> None:
        if not is_same_model:
            self.auditor.clear()
        self._loop.target_replaced(is_same_model)

    @contextmanager
    def _refusals(self, request: GenerationRequest) -> Iterator[None]:
        """Translate errors of the pool."""
        try:
            yield
        except DuplicateRequestError:
            raise AlreadyExistsError(f"request_id: {request.request_id!r} is in flight already") from None
        except PoolFullError as error:
            raise QueueFullError(str(error), self.in_flight.seconds_until_free(error.places)) from None

    def _resume(self, sequence: Sequence) -> None:
        self.pool.resume(sequence)
        self._loop.wake()

    def _abort(self, sequence: Sequence) -> None:
        if sequence.finish is not None:
            return
        self.pool.abort(sequence)
        self.in_flight.aborted(sequence)
        self._loop.wake()

    def _sequences(self, request: GenerationRequest) -> list[Sequence]:
        """The samples of a request, each with its own seed. All but the first copy the prompt of the first."""
        sequences = [
            Sequence(next(self._sequence_ids), sample, TextStream(self.tokenizer.detokenizer(), sample.stop))
            for sample in request.samples()
        ]
        first, *others = sequences
        for other in others:
            other.first_sample_id = first.sequence_id
        for other in others if first.prompt_length > 1 else ():
            # Each sample needs the logits of the last token, so it runs that token itself.
            other.target_prefix = other.draft_prefix = Prefix(first, first.prompt_length - 1)
        return sequences
