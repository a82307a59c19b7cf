"""Draft lengths: near the optimum for any acceptance, batch and costs."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_rounds import confirm_costs, measure_plain_rounds, run_round

from benchmarks.simulate.cells import row
from benchmarks.simulate.machine import COSTS
from specpool.drafting.costs import RoundCosts, StepTimes
from specpool.drafting.draft_lengths import (
    PLAN_ROUNDS,
    DraftLengths,
    DraftOptions,
)
from specpool.drafting.plans import NO_LOOKUP, DraftMethod, Lookup


def line(first: float, more: float) -> StepTimes:
    return StepTimes({rows: first + more * (rows - 1) for rows in (1, 2, 4, 8, 16, 64)})


def costs(draft: float = 0.003, verify: float = 0.02, row: float = 0.001) -> RoundCosts:
    return RoundCosts(line(draft, draft / 10), line(verify, row), exchange=0.001)


def num_draft_tokens(lengths: DraftLengths, limits: dict[int, int]) -> dict[int, int]:
    plans = run_round(lengths, {number: DraftOptions(limit) for number, limit in limits.items()})
    return {number: plan.num_draft_tokens for number, plan in plans.items()}


def trained(rate: float, **knobs: float) -> DraftLengths:
    """Draft lengths after the free trials, with draft tokens of sequence 0 accepted at this rate."""
    lengths = DraftLengths(costs(**knobs), max_num_draft_tokens=8)
    for number in range(200):
        lengths.acceptance.add(0, 1, int((number + 1) * rate) - int(number * rate))
    confirm_costs(lengths)
    for _ in range(PLAN_ROUNDS):
        lengths.choose({0: DraftOptions(8)})
    return lengths


def test_a_round_costs_its_draft_steps_its_verification_and_its_messages() -> None:
    assert costs().seconds(4, []) == pytest.approx(0.02 + 3 * 0.001 + 0.001)
    drafted = (0.003 + 3 * 0.0003) + 0.003
    assert costs().seconds(4, [4, 1]) == pytest.approx(drafted + 0.02 + 8 * 0.001 + 2 * 0.001)


@given(
    limits=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    history=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 8), st.integers(0, 8)), max_size=60),
    max_num_draft_tokens=st.integers(0, 8),
    draft=st.floats(0.0001, 0.1),
    row_cost=st.floats(0.0, 0.02),
)
def test_lengths_keep_all_limits(
    limits: list[int], history: list[tuple[int, int, int]], max_num_draft_tokens: int, draft: float, row_cost: float
) -> None:
    lengths = DraftLengths(costs(draft, row=row_cost), max_num_draft_tokens)
    for sequence, drafted, accepted in history:
        lengths.acceptance.add(sequence, drafted, min(drafted, accepted))
        chosen = num_draft_tokens(lengths, dict(enumerate(limits)))
        assert set(chosen) == set(range(len(limits)))
        assert all(0 <= chosen[i] <= limit for i, limit in enumerate(limits))
        assert max(chosen.values()) <= max(1, max_num_draft_tokens)


def test_each_sequence_drafts_according_to_its_own_rate() -> None:
    lengths = trained(0.9)
    for _ in range(100):
        lengths.acceptance.add(1, 1, 0)
    chosen = num_draft_tokens(lengths, {0: 8, 1: 8})
    assert chosen[0] > 3
    assert chosen[1] == 0
    lengths.acceptance.forget(0)
    lengths.acceptance.forget(1)
    assert lengths.acceptance._sequences == {}


def test_drafts_fill_a_pass_where_another_pass_would_not_pay() -> None:
    """Verifying 64 rows costs little more than one row, and 65 rows cost nearly twice as much."""
    lengths = trained(0.9)
    lengths.costs.draft = line(0.001, 0.00001)
    lengths.costs.verify = StepTimes({1: 0.008, 64: 0.009}, max_rows=64)
    for _ in range(2 * PLAN_ROUNDS):
        chosen = num_draft_tokens(lengths, dict.fromkeys(range(16), 8))
    assert set(chosen.values()) == {3}


def test_new_sequences_start_with_the_rate_of_the_others() -> None:
    good, bad = trained(0.9), trained(0.02)
    assert good.acceptance.rate(99) > 0.8
    assert bad.acceptance.rate(99) < 0.1
    assert num_draft_tokens(good, {99: 8})[99] > num_draft_tokens(bad, {99: 8})[99]


def test_trials_continue_at_negligible_cost() -> None:
    lengths = trained(0.02)
    spent = plain = 0.0
    trials = 0
    for _ in range(2000):
        drafted = num_draft_tokens(lengths, {0: 8})[0]
        plain += lengths.costs.seconds(1, [])
        spent += lengths.costs.seconds(1, [1] * drafted)
        trials += drafted > 0
        lengths.acceptance.add(0, drafted, 0)
    assert trials > 10
    assert spent < 1.015 * plain


def test_trials_notice_a_draft_that_becomes_good() -> None:
    lengths = trained(0.02)
    for _ in range(3000):
        drafted = num_draft_tokens(lengths, {0: 8})[0]
        lengths.acceptance.add(0, drafted, drafted)
        if drafted > 3:
            break
    assert drafted > 3


def test_a_trial_catches_up_only_one_sequence_with_a_large_lag() -> None:
    lengths = DraftLengths(costs(draft=1.0), max_num_draft_tokens=8)
    measure_plain_rounds(lengths)
    plans = lengths.choose({i: DraftOptions(8, draft_lag=100) for i in range(8)})
    assert sum(plan.num_draft_tokens for plan in plans.values()) == 1


def test_prompt_lookup_stops_where_its_rows_begin_another_tile() -> None:
    """For 12 sequences further rows are cheap; for 8 they cost more than they gain."""
    tiled = StepTimes({1: 0.005, 8: 0.0148, 9: 0.0185, 12: 0.0241, 16: 0.0271, 64: 0.09})
    lengths = DraftLengths(RoundCosts(line(0.003, 0.0003), tiled, exchange=0.001), max_num_draft_tokens=8)

    found = Lookup((1,), (0.6,))

    def num_lookup_tokens(sequences: int) -> int:
        options = {i: DraftOptions(8, has_model=False, lookup=found if i < 4 else NO_LOOKUP) for i in range(sequences)}
        return sum(len(plan.lookup_ids) for plan in lengths.choose(options).values())

    measure_plain_rounds(lengths)
    assert sum(num_lookup_tokens(12) for _ in range(100)) == 4 * 100
    assert sum(num_lookup_tokens(8) for _ in range(100)) < 4 * 10, "only trials are left"


def test_near_ties_do_not_oscillate() -> None:
    """A rate that hovers at the edge between two lengths."""
    lengths = trained(0.5)
    chosen = []
    for number in range(400):
        chosen.append(num_draft_tokens(lengths, {0: 8})[0])
        lengths.acceptance.add(0, 2, 1 if number % 2 else 2 * (number % 4 == 0))
    assert sum(before != now for before, now in pairwise(chosen)) <= 20


@pytest.mark.parametrize(
    ("draft", "begins", "goes_on"), [(0.0065, True, True), (0.0082, False, True), (0.0095, False, False)]
)
def test_drafting_starts_with_a_clear_gain_and_stops_without_gain(draft: float, begins: bool, goes_on: bool) -> None:
    """Gains of 8%, of 2% and of none."""
    lengths = trained(0.5)
    assert lengths.plan.steps

    def drafts_with(times: StepTimes) -> bool:
        lengths.costs.draft = times
        for _ in range(PLAN_ROUNDS):
            lengths.choose({0: DraftOptions(1)})
        return bool(lengths.plan.steps)

    assert drafts_with(StepTimes({1: draft, 64: 1.0})) is goes_on
    assert not drafts_with(StepTimes({1: 1.0, 64: 2.0}))
    assert drafts_with(StepTimes({1: draft, 64: 1.0})) is begins


CELLS = [(1, 0.05), (1, 0.5), (4, 0.7), (16, 0.3), (64, 0.5)]


@pytest.mark.parametrize(
    ("batch", "rate", "kind"),
    [
        (4, 0.7, "changing"),
        *(
            pytest.param(*cell, kind, marks=pytest.mark.slow)
            for kind in ("steady", "changing")
            for cell in CELLS
            if (*cell, kind) != (4, 0.7, "changing")
        ),
    ],
)
@pytest.mark.parametrize("name", COSTS)
def test_adaptive_lengths_reach_97_percent_of_the_best_fixed_length(
    name: str, batch: int, rate: float, kind: str
) -> None:
    result = row(name, batch, rate, kind, answers=10)
    assert result["of_best"] >= 0.97, result
    assert result["of_plain"] >= 0.97, result


@pytest.mark.parametrize(("before", "after", "replans"), [(16, 13, True), (2, 1, True), (4, 3, True), (64, 63, False)])
def test_plans_follow_at_once_when_sequences_thin_out(before: int, after: int, replans: bool) -> None:
    lengths = trained(0.9)
    for _ in range(2 * PLAN_ROUNDS):
        num_draft_tokens(lengths, dict.fromkeys(range(before), 8))
        if lengths.plan.sequences == before and lengths._age == 0:
            break
    num_draft_tokens(lengths, dict.fromkeys(range(after), 8))
    assert (lengths.plan.sequences == after) is replans


# --- The ledger


def observed(lengths: DraftLengths, seconds: Callable[[int], float], rate: float = 1.0) -> int:
    """Draft tokens of a round of one sequence, which accepts this share of them and takes `seconds` by their number."""
    k = lengths.choose({0: DraftOptions(8)})[0].num_draft_tokens
    lengths.acceptance.add(0, k, int(rate * k))
    lengths.ledger.observe(1, 1 + int(rate * k), seconds(k), DraftMethod.MODEL if k else None)
    return k


def test_prompt_lookup_goes_on_while_the_model_pauses() -> None:
    lengths = DraftLengths(costs(), max_num_draft_tokens=8)
    measure_plain_rounds(lengths)
    lengths.ledger.observe(1, 1, 0.2, DraftMethod.MODEL)
    plan = lengths.choose({0: DraftOptions(8)})
    for _ in range(PLAN_ROUNDS):
        plan = lengths.choose({0: DraftOptions(8, lookup=Lookup((1,) * 8, (0.95,) * 8))})
    assert len(plan[0].lookup_ids) > 3
    assert plan[0].num_draft_tokens == 0


def test_a_new_model_begins_with_trials() -> None:
    """Rounds are plain until their time is known, and believed costs alone allow one token per sequence."""
    lengths = DraftLengths(costs(), max_num_draft_tokens=8)
    counts = [observed(lengths, lambda k: 0.021 + 0.005 * k) for _ in range(8)]
    assert counts[:5] == [0, 0, 0, 1, 1]
    assert min(counts[5:]) > 1
