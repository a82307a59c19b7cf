"""Simulated rounds: gains of the draft model and prompt lookup, and the plan's recommendation."""

import random
from collections.abc import Sequence

import pytest
from test_plan import model

from specpool.distill.replay import Prediction
from specpool.drafting.costs import RoundCosts, StepTimes
from specpool.drafting.plans import DraftMethod
from specpool.planning.choosing import Choice, choose
from specpool.planning.plan import Plan, Terms, make_plan
from specpool.planning.prediction import MeasuredPair, Speed, replay_acceptance
from specpool.planning.replaying import Recording
from specpool.planning.report import as_json
from specpool.planning.rounds import SourceSpeed, simulate
from specpool.planning.tables import recommendation

LENGTH, PERIOD, VOCAB = 200, 8, 50_000
BATCHES = [1, 8]


def recordings(repeats: bool, agreement: float) -> list[Recording]:
    """Return looping or random answers, and a draft that predicts this share of their tokens."""
    rng, found = random.Random(1), []
    for _ in range(8):
        answer = [rng.randrange(VOCAB) for _ in range(PERIOD if repeats else LENGTH)]
        answer = (answer * LENGTH)[:LENGTH]
        agreed = [rng.random() < agreement for _ in answer]
        prompt = [rng.randrange(VOCAB) for _ in range(20)]
        found.append(Recording(prompt, answer, Prediction([agreed], [[agreement] * LENGTH])))
    return found


def plan_of(answers: Sequence[Recording], *, shared: bool = True) -> Plan:
    target, draft = model("org/target", 0.02), model("org/draft", 0.002)
    return make_plan(target, [(draft, replay_acceptance(answers, 4))], Terms(BATCHES, 4, 0.001, shared=shared))


def methods(plan: Plan) -> dict[int, DraftMethod | None]:
    return {batch: choice.method for batch, choice in plan.chosen.choices.items()}


@pytest.mark.parametrize("shared", [True, False])
def test_repetitive_answers_gain_from_prompt_lookup(shared: bool) -> None:
    plan = plan_of(recordings(repeats=True, agreement=0.0), shared=shared)
    lookups = [each for each in plan.chosen.sources if each.method is DraftMethod.NGRAM]
    assert all(each.of_plain > 1.5 and each.from_lookup > 1 and not each.from_model for each in lookups)
    assert methods(plan) == dict.fromkeys(BATCHES, DraftMethod.NGRAM)
    text = recommendation(plan)
    assert "x plain decoding by prompt lookup" in text
    assert text.splitlines()[-1] == "recommended: --draft none: prompt lookup"
    assert not plan.capacity.drafts
    assert as_json(plan)["recommended"]["method"] == "ngram"


def test_random_answers_and_a_useless_draft_gain_nothing() -> None:
    plan = plan_of(recordings(repeats=False, agreement=0.0))
    assert all(0.95 < each.of_plain < 1.001 for each in plan.chosen.sources)
    assert methods(plan) == dict.fromkeys(BATCHES)
    assert recommendation(plan).endswith("plain decoding: neither prompt lookup nor the draft model is faster")


def test_random_answers_gain_from_a_good_draft() -> None:
    plan = plan_of(recordings(repeats=False, agreement=0.9))
    assert methods(plan) == dict.fromkeys(BATCHES, DraftMethod.BEST)  # about as fast as the model alone
    both = [each for each in plan.chosen.sources if each.method is DraftMethod.BEST]
    assert all(each.of_plain > 1.2 and each.from_model > 1 and not each.from_lookup for each in both)
    last = recommendation(plan).splitlines()[-1]
    assert last.startswith("recommended: --draft-method best, the default: prompt lookup and the draft model, ")
    assert "which the target worker carries" in last


def test_model_and_lookup_gains_add_up() -> None:
    answers = recordings(repeats=True, agreement=0.8)
    answers += recordings(repeats=False, agreement=0.8)
    by_method = {each.method: each for each in plan_of(answers).chosen.sources if each.batch == 1}
    both = by_method.pop(DraftMethod.BEST)
    assert all(both.of_plain > each.of_plain > 1 for each in by_method.values())
    assert both.tokens_per_round == pytest.approx(1 + both.from_model + both.from_lookup)


@pytest.mark.parametrize("shared", [True, False])
def test_a_simulation_is_deterministic(shared: bool) -> None:
    times = StepTimes({1: 0.004, 64: 0.01}), StepTimes({1: 0.02, 64: 0.04})
    pair, answers = MeasuredPair(RoundCosts(*times, 0.001), [1.0], shared, shared), recordings(True, 0.6)
    first, again = (simulate(pair, answers, 3, DraftMethod.BEST, 4) for _ in range(2))
    assert first == again
    assert pair.costs.verify.points == {1: 0.02, 64: 0.04}


@pytest.mark.parametrize(
    ("speeds", "method"),
    [
        ((1.01, 1.01, 1.01), None),
        ((1.10, 1.0, 1.11), DraftMethod.NGRAM),
        ((1.10, 1.32, 1.30), DraftMethod.BEST),
        ((1.10, 1.40, 1.30), DraftMethod.MODEL),
    ],
)
def test_the_simplest_of_similarly_fast_methods_is_chosen(
    speeds: tuple[float, ...], method: DraftMethod | None
) -> None:
    """Speeds of prompt lookup, the model, and both."""
    order = DraftMethod.NGRAM, DraftMethod.MODEL, DraftMethod.BEST
    sources = [
        SourceSpeed(1, each, 100 * speed, speed, 1.5, each is not DraftMethod.NGRAM, 0.5)
        for each, speed in zip(order, speeds, strict=True)
    ]
    choice = choose(Speed(1, 2, 100.0, 1.0, 1), sources)
    assert choice.method == method
    assert isinstance(choice, Choice)
    assert choice.k == (0 if method in (None, DraftMethod.NGRAM) else 2)
