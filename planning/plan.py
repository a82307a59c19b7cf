"""A plan: predictions and a recommendation from what was measured. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.drafting.costs import RoundCosts, StepTimes
from distill.replay import acceptance_by_position, agreement_rate, mean_acceptance_length
from planning.prediction import MeasuredPair, Speed, Workers, best_by_batch, enough, predict, workers
from planning.scaling import LogLinear, fit


@dataclass(frozen=True)
class Model:
    """A model and what its passes cost."""

    name: str
    device: str
    dtype: str
    parameters: int
    """Without embeddings and output head, which say little of what a model can do."""
    room: int
    """Sequences of full length that its KV cache has room for, of as many as were asked for."""
    tokenizer_fingerprint: str
    step_seconds: Mapping[int, float]


@dataclass(frozen=True)
class Terms:
    """The conditions that a plan is made for."""

    batches: Sequence[int]
    longest: int
    """The largest draft length."""
    exchange_seconds: float
    shared: bool | None
    """Whether target and draft take turns on one device; None: if their devices are the same."""


@dataclass(frozen=True)
class DraftPlan:
    """Predictions for one draft."""

    model: Model
    agreement: float
    """The share of the target's tokens that the draft would have chosen too, given all tokens before."""
    by_position: list[float]
    """The share of rounds in which the first draft token was accepted, the first two, and so on."""
    pair: MeasuredPair
    speeds: list[Speed]

    @property
    def best(self) -> dict[int, Speed]:
        """The fastest draft length of each batch."""
        return best_by_batch(self.speeds)


@dataclass(frozen=True)
class Plan:
    """Predictions for all drafts, and a recommendation."""

    target: Model
    drafts: list[DraftPlan]
    scaling: LogLinear | None
    chosen: DraftPlan
    window: Speed
    workers: Workers


def make_plan(target: Model, drafts: Sequence[tuple[Model, Sequence[Sequence[bool]]]], terms: Terms) -> Plan:
    """Plans from measurements. `drafts`: each with where it agrees with the target's answers.

    The chosen draft is the one that is fastest in any batch that fits in the target's KV cache, or in the smallest if
    none does; the window is the smallest of these batches that reaches 95% of that speed.
    """
    plans = [_draft_plan(target, model, agreed, terms) for model, agreed in drafts]
    fitting = {batch for batch in terms.batches if batch <= target.room} or {min(terms.batches)}

    def fastest(plan: DraftPlan) -> float:
        return max(plan.best[batch].tokens_per_second for batch in fitting)

    chosen = max(plans, key=fastest)
    window = enough(chosen.best[batch] for batch in fitting)
    scaling = fit([plan.model.parameters for plan in plans], [plan.agreement for plan in plans])
    return Plan(target, plans, scaling, chosen, window, workers(chosen.pair, window.batch, window.k))


def _draft_plan(target: Model, draft: Model, agreed: Sequence[Sequence[bool]], terms: Terms) -> DraftPlan:
    costs = RoundCosts(StepTimes(draft.step_seconds), StepTimes(target.step_seconds), terms.exchange_seconds)
    lengths = [mean_acceptance_length(agreed, k) for k in range(terms.longest + 1)]
    pair = MeasuredPair(costs, lengths, draft.device == target.device if terms.shared is None else terms.shared)
    return DraftPlan(
        model=draft,
        agreement=agreement_rate(agreed),
        by_position=acceptance_by_position(agreed, terms.longest),
        pair=pair,
        speeds=predict(pair, terms.batches),
    )
