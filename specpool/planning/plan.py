"""A plan: predictions and a recommendation from what was measured. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.drafting.costs import RoundCosts, StepTimes
from specpool.distill.replay import acceptance_by_position, agreement_rate, mean_acceptance_length
from specpool.planning.capacity import Memory, WorkerNeeds, worker_needs
from specpool.planning.prediction import MeasuredPair, Speed, Workers, best_by_batch, enough, predict, workers
from specpool.planning.scaling import LogLinear, fit


@dataclass(frozen=True)
class Model:
    """A model and what its passes cost."""

    name: str
    device: str
    dtype: str
    parameters: int
    """Without embeddings and output head, which say little of what a model can do."""
    memory: Memory
    tokenizer_fingerprint: str
    step_seconds: Mapping[int, float]
    step_cached: int = 0
    """Positions that each sequence had cached in the measured passes."""
    seconds_per_cached: float = 0.0
    """Extra seconds per new token and additional cached position."""
    max_rows: int = 0
    """Most rows of one pass; 0: unlimited."""
    revision: str | None = None
    """Commit of a model from the hub, if it is known."""

    @property
    def on_gpu(self) -> bool:
        """Whether the model ran on a GPU."""
        return not self.device.startswith("cpu")

    def step_times(self, positions: int | None) -> StepTimes:
        """Seconds of passes with sequences of this length; None: as they were measured."""
        times = StepTimes(self.step_seconds, self.step_cached, self.seconds_per_cached, self.max_rows)
        times.cached = self.step_cached if positions is None else positions
        return times


@dataclass(frozen=True)
class Acceptance:
    """How often draft tokens are accepted."""

    agreement: float
    """The share of the target's tokens that the draft would have chosen too, given all tokens before."""
    by_position: list[float]
    """The share of rounds in which the first draft token was accepted, the first two, and so on."""
    lengths: list[float]
    """The mean acceptance length by draft length; 1 without draft tokens."""


def replayed(agreed: Sequence[Sequence[bool]], longest: int) -> Acceptance:
    """Acceptance up to this draft length, from where a draft agrees with the target's answers."""
    lengths = [mean_acceptance_length(agreed, k) for k in range(longest + 1)]
    return Acceptance(agreement_rate(agreed), acceptance_by_position(agreed, longest), lengths)


def constant(rate: float, longest: int) -> Acceptance:
    """Acceptance up to this draft length, if every draft token after accepted ones is accepted at this rate."""
    by_position = [rate**k for k in range(1, longest + 1)]
    return Acceptance(rate, by_position, [1 + sum(by_position[:k]) for k in range(longest + 1)])


@dataclass(frozen=True)
class Terms:
    """The conditions that a plan is made for."""

    batches: Sequence[int]
    longest: int
    """The largest draft length."""
    exchange_seconds: float
    shared: bool | None
    """Whether target and draft take turns on one device; None: if their devices are the same."""
    positions: int | None = None
    """Positions of a sequence; None: a cache for full length, and speed as measured."""
    throughput: float | None = None
    """Tokens per second wanted of all cells together; None: those of one."""


@dataclass(frozen=True)
class DraftPlan:
    """Predictions for one draft."""

    model: Model
    acceptance: Acceptance
    pair: MeasuredPair
    speeds: list[Speed]

    @property
    def best(self) -> dict[int, Speed]:
        """The fastest draft length of each batch."""
        return best_by_batch(self.speeds)


@dataclass(frozen=True)
class Capacity:
    """A cell (a coordinator with one target and one draft worker), and how many of them there should be."""

    slots: int
    target: WorkerNeeds
    draft: WorkerNeeds
    drafts: bool
    """Whether drafting pays in any batch that the window holds."""
    cells: int


@dataclass(frozen=True)
class Plan:
    """Predictions for all drafts, and a recommendation."""

    target: Model
    drafts: list[DraftPlan]
    scaling: LogLinear | None
    chosen: DraftPlan
    window: Speed
    workers: Workers
    capacity: Capacity
    terms: Terms


def make_plan(target: Model, drafts: Sequence[tuple[Model, Acceptance]], terms: Terms) -> Plan:
    """Plans from measurements. `drafts`: each with its acceptance.

    The chosen draft is the one that is fastest in any batch that fits in the target's KV cache, or in the smallest
    batch if none fits; the window is the smallest of these batches that reaches 95% of that speed.
    """
    plans = [_draft_plan(target, model, acceptance, terms) for model, acceptance in drafts]
    room = target.memory.room(terms.positions)
    fitting = {batch for batch in terms.batches if batch <= room} or {min(terms.batches)}

    def fastest(plan: DraftPlan) -> float:
        return max(plan.best[batch].tokens_per_second for batch in fitting)

    chosen = max(plans, key=fastest)
    window = enough(chosen.best[batch] for batch in fitting)
    scaling = fit([plan.model.parameters for plan in plans], [plan.acceptance.agreement for plan in plans])
    needed = workers(chosen.pair, window.batch, window.k)
    return Plan(target, plans, scaling, chosen, window, needed, _capacity(target, chosen, window, terms), terms)


def _draft_plan(target: Model, draft: Model, acceptance: Acceptance, terms: Terms) -> DraftPlan:
    times = draft.step_times(terms.positions), target.step_times(terms.positions)
    shared = draft.device == target.device if terms.shared is None else terms.shared
    pair = MeasuredPair(RoundCosts(*times, terms.exchange_seconds), acceptance.lengths, shared)
    return DraftPlan(draft, acceptance, pair, predict(pair, terms.batches))


def _capacity(target: Model, chosen: DraftPlan, window: Speed, terms: Terms) -> Capacity:
    needs = [
        worker_needs(model.memory, model.on_gpu, window.batch, terms.positions) for model in (target, chosen.model)
    ]
    return Capacity(
        slots=window.batch,
        target=needs[0],
        draft=needs[1],
        drafts=any(speed.k > 0 for batch, speed in chosen.best.items() if batch <= window.batch),
        cells=math.ceil((terms.throughput or 0) / window.tokens_per_second) or 1,
    )
