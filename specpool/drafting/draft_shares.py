"""Assigns draft models to new sequences, by fixed shares or by a bandit on expected tokens/s. Pure.

The bandit is Thompson sampling with discounted evidence (Raj & Kalyani, 2017), but deterministic: a draft's share is
the probability that it is the fastest, and sequences are assigned by largest remainder. Drafts that share rounds also
share their wall time, so the cost model estimates each draft's speed as if it served the whole batch alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import erfc, sqrt

from specpool.drafting.acceptance import expected_tokens
from specpool.drafting.costs import RoundCosts
from specpool.drafting.draft_models import DraftModel

# Decay of all samples' weights per new sample.
DISCOUNT = 1 - 1 / 512
# Samples before a draft counts as proven, and its maximum share until then if another draft is proven.
NEW_SAMPLES, NEW_SHARE = 8, 0.1
# Throughput loss allowed for exploration, and bounds on the minimum share of a draft, which may cost half of that.
EXPLORATION_LOSS, MIN_SHARE, MAX_MIN_SHARE = 0.006, 1 / 4096, 0.02
# Assignments between updates of the shares.
MAX_AGE = 32


@dataclass(frozen=True)
class Speeds:
    """Expected tokens per second of a batch of `sequences`."""

    costs: RoundCosts
    sequences: int
    max_num_draft_tokens: int

    @property
    def plain(self) -> float:
        """Speed of plain decoding."""
        return self.sequences / self.costs.seconds(self.sequences, [])

    def alone(self, model: DraftModel, rate: float) -> float:
        """Speed if this draft serves all sequences at its best draft length, at least one token."""
        return self._best(model, rate)[0]

    def expected(self, model: DraftModel) -> float:
        """Speed to report: at the estimated acceptance rate, and no less than plain decoding."""
        return max(self.plain, self.alone(model, model.evidence.rate.mean))

    def value(self, model: DraftModel, rate: float) -> float:
        """Speed that ranks a draft. Rounds that its workers do not answer in time count as plain."""
        speed = self.alone(model, rate)
        return model.reliability * speed + (1 - model.reliability) * min(speed, self.plain)

    def loss(self, model: DraftModel, best: DraftModel) -> float:
        """Relative loss of throughput per share of this draft, for small shares. Rounds wait for the slowest draft."""
        n = self.sequences
        rate, best_rate = model.evidence.rate.mean, best.evidence.rate.mean
        speed, length, seconds = self._best(best, best_rate)
        waits = length * max(0.0, model.step_times(1) - best.step_times(n))
        mixed = (speed * seconds - expected_tokens(best_rate, length) + expected_tokens(rate, length)) / (
            seconds + waits
        )
        return max(0.0, n * (1 - mixed / speed))

    def _best(self, model: DraftModel, rate: float) -> tuple[float, int, float]:
        """Return the highest speed, the draft length that reaches it, and the seconds of such a round."""
        n, verify = self.sequences, self.costs.verify
        times = model.step_times
        times.cached = verify.cached
        step = times(n)
        waiting = replace(self.costs, draft=times).seconds(n, [n]) - step - verify(2 * n)
        best = 0.0, 0, 1.0
        for length in range(1, 1 + max(1, self.max_num_draft_tokens)):
            seconds = waiting + length * step + verify(n * (1 + length))
            if (speed := n * expected_tokens(rate, length) / seconds) < best[0]:
                break
            best = speed, length, seconds
        return best


@dataclass
class DraftShares:
    """Assigns new sequences to draft models."""

    fixed: Mapping[str, float] = field(default_factory=dict)
    """Shares by the operator's name. Unlisted names share the rest equally. Empty: the bandit chooses."""
    _credit: dict[DraftModel, float] = field(default_factory=dict)
    """Sequences owed to each draft."""
    _age: int = MAX_AGE

    def choose(self, models: Sequence[DraftModel], speeds: Speeds) -> DraftModel | None:
        """Return the draft for a new sequence. `models`: the ready ones. None if all their shares are 0."""
        self.update(models, speeds)
        self._age += 1
        for model in models:
            self._credit[model] += model.share
        chosen = max((model for model in models if model.share), key=self._credit.__getitem__, default=None)
        if chosen is not None:
            self._credit[chosen] -= 1
        return chosen

    def update(self, models: Sequence[DraftModel], speeds: Speeds) -> None:
        """Recompute the shares if the drafts have changed, or after enough samples and assignments."""
        if models and self._credit.keys() == {*models} and self._age < MAX_AGE:
            return
        for model in self._credit:
            model.share = 0.0
        self._credit, self._age = {model: self._credit.get(model, 0.0) for model in models}, 0
        shares = _fixed_shares(models, self.fixed) if self.fixed else bandit_shares(models, speeds)
        for model, share in shares.items():
            model.share = share

    def observe(self, model: DraftModel, sequence_id: int, drafted: float, accepted: float) -> None:
        """Record verified draft tokens of a sequence."""
        if (sample := model.add_tokens(sequence_id, drafted, accepted)) is not None:
            self._add(model, sample)

    def end(self, model: DraftModel, sequence_ids: Iterable[int]) -> None:
        """Record that sequences have ended, or moved to another draft."""
        for sample in model.end(sequence_ids):
            self._add(model, sample)

    def _add(self, model: DraftModel, sample: tuple[float, float]) -> None:
        for each in {model, *self._credit}:
            each.evidence.discount(DISCOUNT)
        model.evidence.add(*sample)
        self._age += MAX_AGE // 8


def bandit_shares(models: Sequence[DraftModel], speeds: Speeds) -> dict[DraftModel, float]:
    """Return each draft's share: its probability of being the fastest, above 0 for all, and small for new drafts."""
    if len(models) <= 1:
        return dict.fromkeys(models, 1.0)
    values, errors = {}, {}
    for model in models:
        rate = model.evidence.rate
        values[model] = speeds.value(model, rate.mean)
        low, high = (speeds.value(model, min(1.0, max(0.0, rate.mean + sign * rate.error))) for sign in (-1, 1))
        errors[model] = (high - low) / 2
    best = max(models, key=values.__getitem__)
    shares = {}
    for model in models:
        rival = max((each for each in models if each is not model), key=values.__getitem__)
        error = sqrt(errors[model] ** 2 + errors[rival] ** 2)
        shares[model] = erfc((values[rival] - values[model]) / (sqrt(2) * max(error, 1e-9 * values[best]))) / 2
    return _bounded(shares, best, speeds)


def _bounded(shares: dict[DraftModel, float], best: DraftModel, speeds: Speeds) -> dict[DraftModel, float]:
    """Apply a minimum share to worse drafts and a maximum to new ones. Proven drafts take the rest.

    While no draft is proven, as after a restart, the first draft takes the rest.
    """
    total = sum(shares.values())
    shares = {model: share / total for model, share in shares.items()}
    proven = [model for model in shares if model.evidence.samples >= NEW_SAMPLES]
    taking = proven or [*shares][:1]
    for model in shares:
        if model is not best:
            affordable = EXPLORATION_LOSS / (max(1e-9, speeds.loss(model, best)) * (len(shares) - 1))
            smallest = min(MAX_MIN_SHARE, max(MIN_SHARE, affordable / 2))
            largest = affordable if model in proven else 1.0
            shares[model] = max(smallest, min(largest, shares[model]))
        if model not in taking:
            shares[model] = min(shares[model], NEW_SHARE)
    rest = 1 - sum(share for model, share in shares.items() if model not in taking)
    total = sum(shares[model] for model in taking)
    return {model: share * rest / total if model in taking else share for model, share in shares.items()}


def _fixed_shares(models: Sequence[DraftModel], fixed: Mapping[str, float]) -> dict[DraftModel, float]:
    """Return the operator's shares of the ready drafts. Drafts with the same name split its share equally."""
    labels = {model.key[0] for model in models}
    others = labels - fixed.keys()
    rest = max(0.0, 1 - sum(fixed.values())) / max(1, len(others))
    by_label = {label: fixed.get(label, rest) for label in labels}
    total = sum(by_label.values())
    counts = {label: sum(model.key[0] == label for model in models) for label in labels}
    return {m: by_label[m.key[0]] / counts[m.key[0]] / total if total else 0.0 for m in models}
