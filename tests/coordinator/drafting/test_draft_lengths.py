"""Draft lengths: near the best there is, whatever the acceptance, the batch and the costs."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import COSTS, row
from coordinator.drafting.costs import RoundCosts, StepTimes
from coordinator.drafting.draft_lengths import PLAN_ROUNDS, RATE_BINS, DraftLengths, DraftOptions, expected_tokens
from coordinator.drafting.trials import FREE_TRIALS

ROWS = (1, 2, 4, 8, 16, 64)


def line(first: float, more: float) -> StepTimes:
    return StepTimes({rows: first + more * (rows - 1) for rows in ROWS})


def costs(draft: float = 0.003, verify: float = 0.02, row: float = 0.001) -> RoundCosts:
    return RoundCosts(line(draft, draft / 10), line(verify, row), exchange=0.001)


def num_draft_tokens(lengths: DraftLengths, limits: dict[int, int]) -> dict[int, int]:
    chosen = lengths.choose({number: DraftOptions(limit) for number, limit in limits.items()})
    return {number: order.num_draft_tokens for number, order in chosen.items()}


# --- Costs


@given(rows=st.integers(1, 200))
def test_between_and_beyond_the_points_times_are_on_straight_lines(rows: int) -> None:
    assert line(0.02, 0.001)(rows) == pytest.approx(0.02 + 0.001 * (rows - 1))


def test_longer_sequences_cost_each_row_more() -> None:
    believed = StepTimes({1: 0.02, 64: 0.05}, cached=100, per_cached=1e-6)
    before = believed(4), believed(5) - believed(4)
    believed.cached = 2100
    assert believed(4) == pytest.approx(before[0] + 4 * 0.002)
    assert believed(5) - believed(4) == pytest.approx(before[1] + 0.002)
    for _ in range(50):
        believed.observe(4, before[0] + 4 * 0.002)
    assert believed.points == pytest.approx({1: 0.02, 64: 0.05}), "what is known of the length is no error"


def test_no_rows_take_no_time() -> None:
    assert line(0.02, 0.001)(0) == 0.0


@settings(deadline=None)
@given(first=st.floats(0.001, 0.1), more=st.floats(0.0001, 0.01))
def test_times_come_near_what_passes_take(first: float, more: float) -> None:
    believed, true = line(0.02, 0.001), line(first, more)
    for _ in range(400):
        for rows in (1, 3, 8, 20, 64, 90):
            believed.observe(rows, true(rows))
    for rows in (1, 3, 8, 20, 64, 90):
        assert believed(rows) == pytest.approx(true(rows), rel=0.1, abs=0.002)


@given(passes=st.lists(st.tuples(st.integers(1, 300), st.sampled_from([0.0, 1e-9, 0.001, 5.0])), max_size=40))
def test_whatever_passes_take_times_stay_above_zero(passes: list[tuple[int, float]]) -> None:
    times = line(0.002, 0.0)
    for rows, seconds in passes:
        times.observe(rows, seconds)
    assert all(times(rows) > 0 for rows in (1, 2, 9, 64, 65, 400))


def test_a_round_is_its_draft_steps_its_verification_and_its_messages() -> None:
    assert costs().seconds(4, []) == pytest.approx(0.02 + 3 * 0.001 + 0.001)
    drafted = (0.003 + 3 * 0.0003) + 0.003
    assert costs().seconds(4, [4, 1]) == pytest.approx(drafted + 0.02 + 8 * 0.001 + 2 * 0.001)


# --- Choosing


@given(
    limits=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    history=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 8), st.integers(0, 8)), max_size=60),
    longest=st.integers(0, 8),
    draft=st.floats(0.0001, 0.1),
    row_cost=st.floats(0.0, 0.02),
)
def test_nobody_drafts_more_than_it_can_use(
    limits: list[int], history: list[tuple[int, int, int]], longest: int, draft: float, row_cost: float
) -> None:
    lengths = DraftLengths(costs(draft, row=row_cost), longest)
    for sequence, drafted, accepted in history:
        lengths.acceptance.add(sequence, drafted, min(drafted, accepted))
        chosen = num_draft_tokens(lengths, dict(enumerate(limits)))
        assert set(chosen) == set(range(len(limits)))
        assert all(0 <= chosen[i] <= limit for i, limit in enumerate(limits))
        assert max(chosen.values()) <= max(1, longest)


def after(rate: float, rounds: int = 200, **knobs: float) -> DraftLengths:
    """Lengths that have seen every draft token of sequence 0 accepted at this rate, and have had their first trials."""
    lengths = DraftLengths(costs(**knobs), max_num_draft_tokens=8)
    for number in range(rounds):
        lengths.acceptance.add(0, 1, int((number + 1) * rate) - int(number * rate))
    for _ in range(FREE_TRIALS + PLAN_ROUNDS):
        lengths.choose({0: DraftOptions(8)})
    return lengths


def test_good_drafts_are_long_and_bad_ones_are_none() -> None:
    assert num_draft_tokens(after(0.95), {0: 8})[0] >= 6
    assert 1 <= num_draft_tokens(after(0.5), {0: 8})[0] <= 3
    assert num_draft_tokens(after(0.05), {0: 8})[0] == 0


def test_each_sequence_drafts_as_far_as_it_pays_for_it() -> None:
    lengths = after(0.9)
    for _ in range(100):
        lengths.acceptance.add(1, 1, 0)
    chosen = num_draft_tokens(lengths, {0: 8, 1: 8})
    assert chosen[0] > 3
    assert chosen[1] == 0


def test_a_pass_is_filled_where_another_one_would_not_pay() -> None:
    """Verifying 64 rows costs little more than one, and verifying 65 nearly twice as much."""
    lengths = after(0.9)
    lengths.costs.draft = line(0.001, 0.00001)
    lengths.costs.verify = StepTimes({1: 0.008, 64: 0.009}, max_rows=64)
    for _ in range(2 * PLAN_ROUNDS):
        chosen = num_draft_tokens(lengths, dict.fromkeys(range(16), 8))
    assert set(chosen.values()) == {3}


def test_a_newcomer_is_believed_to_be_like_the_others() -> None:
    good, bad = after(0.9), after(0.02)
    assert good.acceptance.rate(99) > 0.8
    assert bad.acceptance.rate(99) < 0.1
    assert num_draft_tokens(good, {99: 8})[99] > num_draft_tokens(bad, {99: 8})[99]


def test_what_has_ended_is_forgotten() -> None:
    lengths = after(0.9)
    lengths.acceptance.forget(0)
    assert lengths.acceptance._sequences == {}


def test_probing_costs_next_to_nothing_and_never_stops() -> None:
    lengths = after(0.02)
    spent = plain = 0.0
    probes = 0
    for _ in range(4000):
        drafted = num_draft_tokens(lengths, {0: 8})[0]
        plain += lengths.costs.seconds(1, [])
        spent += lengths.costs.seconds(1, [1] * drafted)
        probes += drafted > 0
        lengths.acceptance.add(0, drafted, 0)
    assert probes > 20
    assert spent < 1.015 * plain


def test_trials_of_one_way_to_draft_take_nothing_from_the_other() -> None:
    lengths = DraftLengths(costs(), max_num_draft_tokens=8)
    for _ in range(50):
        lengths.choose({0: DraftOptions(8, has_model=False, lookup_ids=(1,) * 8, lookup_rate=0.01)})
    lengths.costs.draft = line(5.0, 0.1)  # as a busy machine measured it
    chosen = [lengths.choose({0: DraftOptions(8)})[0].num_draft_tokens for _ in range(FREE_TRIALS)]
    assert all(chosen)


def test_prompt_lookup_ends_where_its_rows_begin_another_tile() -> None:
    """Of 12 sequences, further rows cost little; of 8, they cost more than they gain, however many there are by now."""
    tiled = StepTimes({1: 0.005, 8: 0.0148, 9: 0.0185, 12: 0.0241, 16: 0.0271, 64: 0.09})
    lengths = DraftLengths(RoundCosts(line(0.003, 0.0003), tiled, exchange=0.001), max_num_draft_tokens=8)

    def by_lookup(sequences: int) -> int:
        found = {
            i: DraftOptions(8, has_model=False, lookup_ids=(1,) * (i < 4), lookup_rate=0.6) for i in range(sequences)
        }
        return sum(len(order.lookup_ids) for order in lengths.choose(found).values())

    assert sum(by_lookup(12) for _ in range(100)) == 4 * 100
    assert sum(by_lookup(8) for _ in range(100)) < 4 * 10, "only trials are left"


def test_only_one_of_those_who_lack_much_is_caught_up_to_try() -> None:
    lengths = DraftLengths(costs(draft=1.0), max_num_draft_tokens=8)
    chosen = lengths.choose({i: DraftOptions(8, draft_lag=100) for i in range(8)})
    assert sum(order.num_draft_tokens for order in chosen.values()) == 1


def test_a_draft_that_becomes_good_is_noticed() -> None:
    lengths = after(0.02)
    for _ in range(3000):
        drafted = num_draft_tokens(lengths, {0: 8})[0]
        lengths.acceptance.add(0, drafted, drafted)
        if drafted > 3:
            break
    assert drafted > 3


def test_near_ties_do_not_swing() -> None:
    """A rate that wanders about the edge between two lengths."""
    lengths = after(0.5)
    chosen = []
    for number in range(400):
        k = num_draft_tokens(lengths, {0: 8})[0]
        chosen.append(k)
        lengths.acceptance.add(0, 2, 1 if number % 2 else 2 * (number % 4 == 0))
    swings = sum(before != now for before, now in pairwise(chosen))
    assert swings <= 20


@pytest.mark.parametrize(
    ("draft", "begins", "goes_on"), [(0.0065, True, True), (0.0082, False, True), (0.0095, False, False)]
)
def test_drafting_begins_where_it_gains_clearly_and_ends_where_it_gains_nothing(
    draft: float, begins: bool, goes_on: bool
) -> None:
    """Gains of 8%, of 2% and of none."""
    lengths = after(0.5)
    assert lengths.plan.steps
    lengths.costs.draft = StepTimes({1: draft, 64: 1.0})
    assert bool(decided(lengths)) is goes_on
    lengths.costs.draft = StepTimes({1: 1.0, 64: 2.0})
    assert not decided(lengths)
    lengths.costs.draft = StepTimes({1: draft, 64: 1.0})
    assert bool(decided(lengths)) is begins


def decided(lengths: DraftLengths) -> tuple[float, ...]:
    """The steps of the next plan."""
    for _ in range(PLAN_ROUNDS):
        lengths.choose({0: DraftOptions(1)})
    return lengths.plan.steps


@given(rate=st.floats(0, 1), k=st.integers(0, 8))
def test_expected_tokens(rate: float, k: int) -> None:
    assert 1 <= expected_tokens(rate, k) <= k + 1
    assert expected_tokens(1.0, k) == k + 1


def test_rates_are_told_apart_finely_enough() -> None:
    assert RATE_BINS >= 20


@pytest.mark.parametrize("kind", ["steady", "changing"])
@pytest.mark.parametrize(("batch", "rate"), [(1, 0.05), (1, 0.5), (4, 0.7), (16, 0.3), (64, 0.5)])
@pytest.mark.parametrize("name", COSTS)
def test_within_three_hundredths_of_the_best_fixed_length_in_hindsight(
    name: str, batch: int, rate: float, kind: str
) -> None:
    found = row(name, batch, rate, kind, answers=10)
    assert found["of_best"] >= 0.97, found
    assert found["of_plain"] >= 0.97, found
