"""Assignment of drafts to new sequences, with fixed shares and with the bandit on simulated traffic."""

import random
from collections.abc import Callable, Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpool.drafting.costs import RoundCosts, StepTimes
from specpool.drafting.draft_models import DraftModel
from specpool.drafting.draft_shares import NEW_SHARE, DraftShares, Speeds

VERIFY = {1: 0.020, 64: 0.030}
STEP = 0.001
SEQUENCES = 16


def speeds(sequences: int = SEQUENCES) -> Speeds:
    return Speeds(RoundCosts(StepTimes({1: STEP, 64: STEP}), StepTimes(VERIFY), 0.001), sequences, 8)


def make_model(name: str, step: float = STEP, fingerprint: str = "") -> DraftModel:
    return DraftModel((name, fingerprint), name, step_times=StepTimes({1: step, 64: step}))


def assigned(shares: DraftShares, models: list[DraftModel], count: int) -> list[str]:
    chosen = (shares.choose(models, speeds()) for _ in range(count))
    return ["" if model is None else model.name for model in chosen]


class Traffic:
    """Simulated sequences whose acceptance rates vary around the rate of their draft."""

    def __init__(self, rates: Mapping[str, float], steps: Mapping[str, float] | None = None, seed: int = 1) -> None:
        self.rates, self._chance = dict(rates), random.Random(seed)
        self.models = [make_model(name, (steps or {}).get(name, STEP)) for name in rates]
        self.shares = DraftShares()

    def run(self, sequences: int) -> Iterator[DraftModel]:
        for sequence_id in range(sequences):
            model = self.shares.choose(self.models, speeds())
            assert model is not None
            mean = self.rates[model.name]
            rate = self._chance.betavariate(10 * mean, 10 * (1 - mean))
            for _ in range(50):
                accepted = next((i for i in range(4) if self._chance.random() >= rate), 4)
                self.shares.observe(model, sequence_id, 4, accepted)
            self.shares.end(model, [sequence_id])
            yield model

    def share(self, name: str, sequences: int = 1000) -> float:
        """Return the share of the next sequences that a draft gets."""
        return sum(model.name == name for model in self.run(sequences)) / sequences

    def loss(self, sequences: int) -> float:
        """Return the relative loss of throughput from sequences that do not get the best draft."""
        now = speeds()
        true = {model.name: now.alone(model, self.rates[model.name]) for model in self.models}
        best = max(self.models, key=lambda model: true[model.name])
        lost = [now.loss(model, best) for model in self.run(sequences)]
        return sum(lost) / len(lost)


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0, 0.25), max_size=4), st.integers(1, 300))
def test_fixed_shares_hold_at_any_time(fixed: dict[str, float], count: int) -> None:
    models = [make_model(name) for name in "abcd"]
    names = assigned(DraftShares(fixed or {"a": 0.25}), models, count)
    for model in models:
        assert abs(names.count(model.name) - model.share * count) < len(models)
    assert sum(model.share for model in models) in (0, pytest.approx(1))


def test_fixed_shares() -> None:
    models = [make_model("current"), make_model("new"), make_model("other")]
    assert assigned(DraftShares({"new": 0.1}), models[:2], 10).count("new") == 1
    assert [model.share for model in models] == [0.9, 0.1, 0]
    assigned(DraftShares({"new": 0.1}), models, 1)
    assert [model.share for model in models] == pytest.approx([0.45, 0.1, 0.45])
    assert assigned(DraftShares({"new": 0.0}), models[:2], 3) == ["current"] * 3, "withdrawn"
    assert assigned(DraftShares({"new": 0.0}), models[1:2], 2) == ["", ""], "even if nothing else is ready"
    assert assigned(DraftShares({"new": 0.1}), models[1:2], 2) == ["new"] * 2
    updated = [make_model("current", fingerprint=each) for each in ("one", "other")]
    assigned(DraftShares({"new": 0.5}), [*updated, models[1]], 1)
    assert [model.share for model in updated] == [0.25, 0.25], "drafts with the same name divide its share"


@pytest.mark.parametrize(("current", "new"), [(0.8, 0.3), (0.3, 0.8), (0.7, 0.78)])
def test_the_better_draft_wins(current: float, new: float) -> None:
    traffic = Traffic({"current": current, "new": new})
    better = max(traffic.rates, key=traffic.rates.__getitem__)
    traffic.share(better, 600)
    assert traffic.share(better) > 0.9
    others = 1 - traffic.share(better)
    assert others > 0, "a worse draft is still tried"


@pytest.mark.parametrize("rates", [(0.8, 0.79), (0.8, 0.75), (0.8, 0.6), (0.8, 0.1), (0.5, 0.3)], ids=str)
@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_exploration_costs_less_than_one_per_cent(rates: tuple[float, float], slower: float) -> None:
    traffic = Traffic(dict(zip(("a", "b"), rates, strict=True)), {"b": slower * STEP})
    traffic.share("a", 600)
    assert traffic.loss(2000) < 0.01


def test_three_drafts() -> None:
    traffic = Traffic({"a": 0.5, "b": 0.8, "c": 0.6})
    traffic.share("b", 600)
    assert traffic.share("b") > 0.9


@pytest.mark.parametrize("seed", range(3))
def test_shares_follow_a_change_of_acceptance(seed: int) -> None:
    traffic = Traffic({"a": 0.8, "b": 0.4}, seed=seed)
    traffic.share("a", 1000)
    traffic.rates["a"] = 0.3
    traffic.share("a", 1500)
    assert traffic.share("b") > 0.8
    traffic.rates["a"] = 0.8
    traffic.share("a", 1500)
    assert traffic.share("a") > 0.8


def test_the_first_draft_serves_before_any_is_proven() -> None:
    """After a restart, other drafts may turn out to be bad."""
    models = [make_model("current"), make_model("new"), make_model("other")]
    assert assigned(DraftShares(), models, 10).count("current") == 8
    assert [model.share for model in models] == pytest.approx([1 - 2 * NEW_SHARE, NEW_SHARE, NEW_SHARE])


def test_a_new_draft_starts_small() -> None:
    traffic = Traffic({"current": 0.7})
    assert traffic.share("current", 100) == 1
    traffic.rates["new"] = 0.9
    traffic.models.append(make_model("new"))
    assert 0 < traffic.share("new", 20) <= NEW_SHARE
    traffic.share("new", 400)
    assert traffic.share("new", 500) > 0.8


@pytest.mark.parametrize("fault", ["slow", "late", "crashes"])
def test_a_draft_that_costs_time_loses_its_share(fault: str) -> None:
    traffic = Traffic({"current": 0.7, "new": 0.75}, {"new": STEP * (8 if fault == "slow" else 1)})
    new = traffic.models[1]
    spoil: Mapping[str, Callable[[], None]] = {
        "slow": lambda: None,
        "late": lambda: new.observe_call(is_answered=False),
        "crashes": lambda: new.observe_call(is_answered=False, is_failure=True),
    }
    for _ in range(60):
        for model in traffic.run(20):
            model.observe_call(is_answered=True)
            if model is new:
                for _ in range(30 if fault == "late" else 1):
                    spoil[fault]()
    assert traffic.share("new", 500) < 0.1
