"""A plan: predictions and a recommendation from measurements. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from statistics import linear_regression

from specpool.drafting.costs import RoundCosts
from specpool.drafting.plans import DraftMethod
from specpool.planning.choosing import Choice, choose, smallest_sufficient
from specpool.planning.next_worker import NextWorker, next_worker
from specpool.planning.plausibility import check_times
from specpool.planning.prediction import (
    Acceptance,
    MeasuredPair,
    Memory,
    Model,
    Speed,
    Workers,
    balanced_workers,
    predict,
)
from specpool.planning.rounds import SourceSpeed, simulate
from specpool.protocol.worker_info import readable_name

GIB = 2**30
HOST_BYTES, GPU_HOST_BYTES = 2 * GIB, 4 * GIB
"""Empirical host memory of a worker beyond weights, activations and cache: Python, torch, compiled kernels in /tmp, and
the CUDA libraries with a GPU."""


METHODS = (DraftMethod.NGRAM, DraftMethod.MODEL, DraftMethod.BEST)
"""Draft methods to compare, simplest first."""


@dataclass(frozen=True)
class Terms:
    """Conditions of a plan."""

    batches: Sequence[int]
    max_k: int
    """Maximum draft tokens of a sequence in a round."""
    exchange_seconds: float
    """Seconds for a message to a worker and its answer."""
    shared: bool | None
    """Whether target and draft share a device, and the target worker carries the draft; None: if the names of their
    devices are equal, and only on a GPU."""
    positions: int | None = None
    """Positions of a sequence; None: EXPECTED_POSITIONS for the cache, and speed as measured."""
    throughput: float | None = None
    """Required tokens per second of all cells together; None: one cell."""
    targets: int = 1
    drafts: int = 1
    """Workers behind a coordinator now."""
    concurrency: int | None = None
    """Requests at a time; None: the recommended batch for each target."""


@dataclass(frozen=True)
class DraftPlan:
    """Predictions for one draft."""

    model: Model
    acceptance: Acceptance
    pair: MeasuredPair
    speeds: list[Speed]
    sources: list[SourceSpeed]
    """Simulated speeds for each batch and draft method. Empty without recorded answers."""

    @property
    def choices(self) -> dict[int, Choice]:
        """The recommended draft method of each batch."""
        by_batch = {batch: [each for each in self.sources if each.batch == batch] for batch in self.best}
        return {batch: choose(best, by_batch[batch]) for batch, best in self.best.items()}

    @property
    def best(self) -> dict[int, Speed]:
        """The fastest k of each batch; the smallest among equals."""
        by_batch = groupby(self.speeds, attrgetter("batch"))
        return {batch: max(speeds, key=attrgetter("tokens_per_second")) for batch, speeds in by_batch}

    def best_separate(self, batch: int) -> float | None:
        """Return the highest tokens/s of a batch with a draft worker; None unless the target carries the draft."""
        found = [each.separate for each in self.speeds if each.batch == batch and each.separate is not None]
        return max(found, default=None)


@dataclass(frozen=True)
class WorkerNeeds:
    """Memory of one deployed worker, in bytes."""

    slot_bytes: int
    kv_bytes: int
    device_bytes: int
    """Weights, activations and KV cache."""
    request_bytes: int
    """The pod's memory request."""
    limit_bytes: int
    """The pod's memory limit: loading can hold the weights in memory twice."""


def worker_needs(memory: Memory, on_gpu: bool, slots: int, positions: int | None) -> WorkerNeeds:
    """Compute the memory of a worker with `slots` sequences of this length; None: full length."""
    kv = memory.kv_bytes(slots, positions)
    device = memory.weights + memory.activations + kv
    # Weights pass through host memory on their way to a GPU.
    request = memory.weights + GPU_HOST_BYTES if on_gpu else device + HOST_BYTES
    return WorkerNeeds(
        slot_bytes=memory.slot_bytes(positions),
        kv_bytes=kv,
        device_bytes=device,
        request_bytes=request,
        limit_bytes=request + memory.weights,
    )


@dataclass(frozen=True)
class Capacity:
    """A cell (a coordinator with one target and one draft worker), and the number of cells."""

    slots: int
    target: WorkerNeeds
    draft: WorkerNeeds
    drafts: bool
    """Whether drafting pays in any batch up to `slots`."""
    cells: int


@dataclass(frozen=True)
class LogLinear:
    """Agreement of a draft with its target by size: intercept + per_decade * log10(parameters), clamped to [0, 1].

    Source: Yan et al. 2025, Scaling Laws for Speculative Decoding, arXiv 2505.07858.
    """

    intercept: float
    per_decade: float

    def __call__(self, parameters: float) -> float:
        """Expected agreement of a draft of this size."""
        return min(1.0, max(0.0, self.intercept + self.per_decade * math.log10(parameters)))


def fit(sizes: Sequence[int], agreement: Sequence[float]) -> LogLinear | None:
    """Fit by least squares; None with fewer than two sizes."""
    if len(set(sizes)) < 2:
        return None
    slope, intercept = linear_regression([math.log10(size) for size in sizes], agreement)
    return LogLinear(intercept, slope)


def other_sizes(sizes: Sequence[int], target: int) -> list[int]:
    """Return round sizes from a tenth of the smallest draft up to the target."""
    rounded = (first * 10**decade for decade in range(len(str(target))) for first in (1, 3))
    return [size for size in rounded if min(sizes) / 10 <= size < target]


@dataclass(frozen=True)
class Plan:
    """Predictions for all drafts, and a recommendation."""

    target: Model
    drafts: list[DraftPlan]
    scaling: LogLinear | None
    chosen: DraftPlan
    window: Choice
    """The recommended batch."""
    workers: Workers
    next_worker: NextWorker
    capacity: Capacity
    terms: Terms

    @property
    def is_colocated(self) -> bool:
        """Whether the target worker carries the draft."""
        return self.chosen.pair.carried and self.capacity.drafts

    @property
    def method(self) -> DraftMethod | None:
        """Draft method of the server, which must suit all batches up to the recommended one. None: plain decoding."""
        if not self.chosen.sources:  # the default chooses in each round
            return DraftMethod.BEST
        choices = self.chosen.choices.values()
        methods = {choice.method for choice in choices if choice.batch <= self.window.batch} - {None}
        return methods.pop() if len(methods) == 1 else DraftMethod.BEST if methods else None

    def agreement_of_other_sizes(self) -> dict[int, float]:
        """Expected agreement of drafts of other sizes; empty without a fit."""
        sizes = other_sizes([draft.model.size for draft in self.drafts], self.target.size)
        return {} if self.scaling is None else {size: self.scaling(size) for size in sizes}


def make_plan(target: Model, drafts: Sequence[tuple[Model, Acceptance]], terms: Terms) -> Plan:
    """Choose the draft with the highest throughput, and the smallest batch that reaches 95% of it.

    Only batches that fit in the target's KV cache count; if none fits, the smallest one does. ImplausibleTimesError.
    """
    for model in (target, *(model for model, _ in drafts)):
        check_times(readable_name(model.name), model.step_seconds)
    plans = [_draft_plan(target, model, acceptance, terms) for model, acceptance in drafts]
    fits = target.memory.capacity(terms.positions)
    batches = {batch for batch in terms.batches if batch <= fits} or {min(terms.batches)}
    chosen = max(plans, key=lambda plan: max(plan.choices[batch].tokens_per_second for batch in batches))
    window = smallest_sufficient(chosen.choices[batch] for batch in batches)
    scaling = fit([plan.model.size for plan in plans], [plan.acceptance.agreement for plan in plans])
    workers = balanced_workers(chosen.pair, window.batch, window.k)
    concurrency = terms.concurrency or window.batch * terms.targets
    following = next_worker(chosen.pair, terms.targets, terms.drafts, concurrency, max(1, fits))
    capacity = _capacity(target, chosen, window, terms)
    return Plan(target, plans, scaling, chosen, window, workers, following, capacity, terms)


def _draft_plan(target: Model, draft: Model, acceptance: Acceptance, terms: Terms) -> DraftPlan:
    times = draft.step_times(terms.positions), target.step_times(terms.positions)
    shared = draft.device == target.device if terms.shared is None else terms.shared
    # As `specpool up` does: on a CPU, a draft worker runs beside the target worker.
    carried = shared and (target.on_gpu or terms.shared is True)
    pair = MeasuredPair(RoundCosts(*times, terms.exchange_seconds), acceptance.lengths, shared, carried)
    recordings = [each for each in acceptance.recordings if len(each.token_ids) > 1]
    sources = [
        simulate(pair, recordings, batch, method, terms.max_k)
        for batch in terms.batches
        for method in METHODS
        if recordings
    ]
    return DraftPlan(draft, acceptance, pair, predict(pair, terms.batches), sources)


def _capacity(target: Model, chosen: DraftPlan, window: Choice, terms: Terms) -> Capacity:
    target_needs, draft_needs = (
        worker_needs(model.memory, model.on_gpu, window.batch, terms.positions) for model in (target, chosen.model)
    )
    return Capacity(
        slots=window.batch,
        target=target_needs,
        draft=draft_needs,
        drafts=any(choice.k > 0 for batch, choice in chosen.choices.items() if batch <= window.batch),
        cells=math.ceil((terms.throughput or 0) / window.tokens_per_second) or 1,
    )
