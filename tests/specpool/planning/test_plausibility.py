"""Times of passes that cannot be true are measured again, and never lead to a recommendation."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specpool.planning.plan import Terms, make_plan
from specpool.planning.plausibility import (
    ALWAYS,
    ALWAYS_ROWS,
    IGNORED_SECONDS,
    MAX_REPEATS,
    REPEATS,
    TOLERANCE,
    ImplausibleTimesError,
    check_times,
    contradictions,
    measure_times,
)
from specpool.planning.prediction import Memory, Model, constant_acceptance

ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
NONSENSE = {1: 0.82, 2: 0.5, 4: 0.19, 8: 0.2}
"""Measured on a busy machine."""
milliseconds = st.floats(0.001, 10)


def true_times(rows: int) -> float:
    return 0.01 + 0.0005 * rows


def plan_with(target: dict[int, float], draft: dict[int, float]) -> None:
    memory = Memory(0, 0, 1, positions=10**6, multiple=1, max_model_len=4096)
    models = [Model(name, "cpu", "float32", 1, memory, "", times) for name, times in (("t", target), ("d", draft))]
    make_plan(models[0], [(models[1], constant_acceptance(0.7, 4))], Terms([1, 2, 4], 4, 0.001, shared=True))


@given(
    times=st.dictionaries(st.sampled_from(ROWS), milliseconds, min_size=2),
    of_target=st.booleans(),
    excess=st.floats(1.01, 100),
    data=st.data(),
)
def test_a_pass_slower_than_a_larger_one_never_leads_to_a_recommendation(
    times: dict[int, float], of_target: bool, excess: float, data: st.DataObject
) -> None:
    fewer, more = sorted(data.draw(st.lists(st.sampled_from(sorted(times)), min_size=2, max_size=2, unique=True)))
    times[fewer] = (times[more] * (1 + TOLERANCE) + IGNORED_SECONDS) * excess
    good = {rows: true_times(rows) for rows in ROWS}
    with pytest.raises(ImplausibleTimesError, match="^t: " if of_target else "^d: "):
        plan_with(*((times, good) if of_target else (good, times)))


@given(first=milliseconds, share=st.floats(0, 1), noise=st.lists(st.floats(1, 1.1), min_size=9, max_size=9))
def test_ordinary_measurements_are_plausible(first: float, share: float, noise: list[float]) -> None:
    """Passes whose cost grows with a share of their rows, measured with 10% of noise."""
    times = {rows: first * (1 + share * (rows - 1)) * factor for rows, factor in zip(ROWS, noise, strict=True)}
    assert contradictions(times) == []


def test_the_message_names_the_worst_measurements() -> None:
    with pytest.raises(ImplausibleTimesError) as caught:
        check_times("target", NONSENSE)
    assert str(caught.value) == (
        "target: 1 row took 820.0 ms, but 4 rows took 190.0 ms; 2 rows took 500.0 ms, but 4 rows took 190.0 ms"
    )


def test_a_pass_slower_per_row_than_a_smaller_one_is_a_contradiction() -> None:
    (found,) = contradictions({1: 0.01, 2: 0.012, 4: 0.5})[:1]
    assert (found.slow, found.other) == (4, 2)
    check_times("target", {8: 0.0282, 9: 0.036})  # the first row of a GEMM tile costs as much as several later ones


def test_differences_below_a_message_do_not_matter() -> None:
    check_times("draft", {1: IGNORED_SECONDS, 2: IGNORED_SECONDS / 10})


@given(seed=st.integers(0, 2**32), slow=st.floats(2, 100))
def test_a_machine_that_is_busy_now_and_then_still_gives_true_times(seed: int, slow: float) -> None:
    rng = random.Random(seed)
    calls: list[int] = []

    def seconds_of(rows: int) -> float:
        calls.append(rows)
        return true_times(rows) * (slow if rng.random() < 0.3 else 1)

    times = measure_times(seconds_of, ROWS, budget_seconds=1e9)
    assert set(times) == set(ROWS)
    assert all(calls.count(rows) >= REPEATS for rows in ROWS)
    assume(not contradictions(times))  # bad luck
    assert all(times[rows] <= 4 * true_times(rows) for rows in ROWS[:-1])


def test_contradictions_are_measured_again() -> None:
    calls: list[int] = []
    steps: list[str] = []

    def seconds_of(rows: int) -> float:
        calls.append(rows)
        return 0.5 if rows == 1 and calls.count(1) <= REPEATS + 1 else true_times(rows)

    times = measure_times(seconds_of, ROWS, 1e9, steps.append)
    assert times == {rows: true_times(rows) for rows in ROWS}
    assert calls[REPEATS * len(ROWS) :] == [1, 1]
    assert steps[-1] == "rows: 1, again"


def test_a_machine_that_stays_busy_ends_the_measurement() -> None:
    calls: list[int] = []

    def seconds_of(rows: int) -> float:
        calls.append(rows)
        return NONSENSE[rows]

    times = measure_times(seconds_of, list(NONSENSE), 1e9)
    assert max(map(calls.count, NONSENSE)) == MAX_REPEATS
    with pytest.raises(ImplausibleTimesError):
        plan_with(times, {rows: true_times(rows) for rows in ROWS})


@given(pass_seconds=st.floats(0.001, 100), budget=st.floats(0.1, 100))
def test_measuring_keeps_to_its_budget(pass_seconds: float, budget: float) -> None:
    calls: list[int] = []

    def seconds_of(rows: int) -> float:
        calls.append(rows)
        return pass_seconds

    times = measure_times(seconds_of, ROWS, budget)
    always = [rows for rows in ROWS if rows <= ALWAYS_ROWS]
    assert set(always) <= set(times)
    assert all(calls.count(rows) >= ALWAYS for rows in always)
    assert len(calls) * pass_seconds <= budget + (ALWAYS * len(always) + 1) * pass_seconds
