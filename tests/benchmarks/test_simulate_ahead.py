"""The simulation of drafting ahead agrees with closed forms where they exist, and never exceeds its bound."""

import argparse
import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import simulate_ahead
from benchmarks.ahead import BRANCHES, LENGTHS, STRATEGIES, Outcomes, Pair, Plan, best, speed
from benchmarks.emulated_worker import pass_seconds
from benchmarks.split_devices import bound

VERIFY, DRAFT = pass_seconds(6, 0.03), pass_seconds(0.8, 0.01)
PAIR = Pair(0.75, 0.5, VERIFY, DRAFT, exchange=0.001)
PERFECT = replace(PAIR, acceptance=1.0)

counts, lengths = st.integers(1, 64), st.sampled_from(LENGTHS)
chances = st.floats(0, 1)


def gain(k: int, acceptance: float = 0.75) -> float:
    """Expected tokens of a verification of `k` draft tokens."""
    return sum(acceptance**i for i in range(k + 1))


# --- Closed forms


@given(counts, lengths)
def test_perfect_drafts_in_turn_take_the_time_of_their_passes(count: int, k: int) -> None:
    seconds = k * DRAFT(count) + VERIFY(count * (k + 1)) + 2 * PERFECT.exchange
    measured = speed(count, PERFECT, STRATEGIES["in turn"], Plan(k, k), rounds=5)
    assert measured == pytest.approx(count * (k + 1) / seconds)


def test_random_drafts_in_turn_have_the_expected_speed() -> None:
    seconds = 4 * DRAFT(8) + VERIFY(40) + 2 * PAIR.exchange
    measured = speed(8, PAIR, STRATEGIES["in turn"], Plan(4, 4), rounds=5000)
    assert measured == pytest.approx(8 * gain(4) / seconds, rel=0.01)


@pytest.mark.parametrize(("count", "k"), [(2, 1), (2, 8), (8, 4), (64, 3), (64, 12)])
def test_two_groups_take_the_cycle_of_the_decisions_page(count: int, k: int) -> None:
    draft, verify = k * DRAFT(count // 2), VERIFY(count // 2 * (k + 1))
    cycle = max(2 * draft, 2 * verify, draft + verify + 2 * PERFECT.exchange)
    measured = speed(count, PERFECT, STRATEGIES["two groups"], Plan(k, k), rounds=500)
    assert measured == pytest.approx(count * (k + 1) / cycle, rel=0.01)


@pytest.mark.parametrize("name", ["chain", "chain, rest again", "chain, rest plain", "outcomes, again"])
def test_a_chain_that_is_always_right_hides_the_draft(name: str) -> None:
    plan = Plan(4, 0 if name.endswith("plain") else 4)
    measured = speed(2, PERFECT, STRATEGIES[name], plan, rounds=1000)
    assert measured == pytest.approx(2 * 5 / (VERIFY(10) + PERFECT.exchange), rel=0.01)


def test_a_queued_chain_that_is_always_right_hides_the_wire() -> None:
    measured = speed(2, PERFECT, STRATEGIES["outcomes, queued"], Plan(4, 0), rounds=1000)
    assert measured == pytest.approx(2 * 5 / VERIFY(10), rel=0.01)


def test_branches_end_with_the_verification() -> None:
    pair = replace(PERFECT, draft=lambda rows: 0.0025)  # two steps fit: the bonus token, and one draft token
    measured = speed(1, pair, STRATEGIES["outcomes, plain"], Plan(8, 0), rounds=1000)
    assert measured == pytest.approx(2 / (VERIFY(2) + pair.exchange), rel=0.01)


@pytest.mark.parametrize("branches", [1, 4, 16])
def test_plain_rows_for_other_outcomes_are_a_chain_of_two_states(branches: int) -> None:
    """One sequence has no draft tokens, or 3: its next state depends only on whether its outcome was continued."""
    begins, stays = (Outcomes(PAIR, k, branches, chain=False).covered for k in (0, 3))
    drafted = begins / (begins + 1 - stays)
    seconds = (1 - drafted) * VERIFY(1) + drafted * VERIFY(4) + PAIR.exchange
    expected = (1 - drafted + drafted * gain(3)) / seconds
    measured = speed(1, PAIR, STRATEGIES["outcomes, plain"], Plan(3, 0, branches), rounds=40_000)
    assert measured == pytest.approx(expected, rel=0.02)


def test_one_outcome_of_good_guesses_is_the_chain() -> None:
    pair = replace(PAIR, acceptance=0.9)  # 0.9 ** 5 exceeds the chance of every outcome with a rejection
    for count in (1, 8):
        for rest, length in (("again", 4), ("plain", 0)):
            chain, outcome = STRATEGIES[f"chain, rest {rest}"], STRATEGIES[f"outcomes, {rest}"]
            speeds = {speed(count, pair, strategy, Plan(4, length), rounds=500) for strategy in (chain, outcome)}
            assert len(speeds) == 1


# --- Outcomes


@given(chances, chances, st.integers(0, 8), st.sampled_from(BRANCHES))
def test_continued_outcomes_are_the_most_probable(acceptance: float, second: float, k: int, branches: int) -> None:
    pair = replace(PAIR, acceptance=acceptance, second_guess=second)
    guesses = pair.guess_chances(40)
    every = [acceptance**j * chance for j in range(k) for chance in guesses[1:]]
    every += [acceptance**k * chance for chance in guesses]
    expected = sum(sorted(every)[-branches:])
    assert Outcomes(pair, k, branches, chain=False).covered == pytest.approx(expected, abs=1e-9)
    assert expected < 1 + 1e-9


def test_the_draft_knows_as_much_as_in_the_measured_pair() -> None:
    """Shares of rounds of the embedded pair whose outcome was among the 4 most probable, and among 8."""
    pair = replace(PAIR, acceptance=0.46, second_guess=0.15)
    found = [Outcomes(pair, k, branches, chain=False).covered for k in (1, 3) for branches in (4, 8)]
    assert found == pytest.approx([0.43, 0.50, 0.30, 0.37], abs=0.09)


# --- Bounds


@settings(max_examples=60)
@given(
    st.sampled_from(list(STRATEGIES)),
    counts,
    chances,
    chances,
    st.tuples(st.floats(1, 20), st.floats(0, 0.5)),
    st.tuples(st.floats(0.1, 10), st.floats(0, 0.5)),
    st.sampled_from((0.0, 0.0005, 0.005)),
    lengths,
    st.sampled_from(BRANCHES),
)
def test_no_strategy_exceeds_the_bound(
    name: str,
    count: int,
    acceptance: float,
    second: float,
    verify: tuple[float, float],
    draft: tuple[float, float],
    exchange: float,
    length: int,
    branches: int,
) -> None:
    strategy = STRATEGIES[name]
    pair = Pair(acceptance, second, pass_seconds(*verify), pass_seconds(*draft), exchange)
    plan = Plan(length, 0 if strategy.redraft == "none" else length, branches)
    rounds = 1 + 8000 // count
    limit = bound(count, None, argparse.Namespace(verify_ms=verify, acceptance=acceptance))
    assert speed(count, pair, strategy, plan, rounds) <= limit * 1.1  # random acceptance


def test_best_plans_of_more_options_are_faster() -> None:
    speeds = {name: best(4, PAIR, strategy, 8)[1] for name, strategy in STRATEGIES.items()}
    assert speeds["chain, rest again"] >= 0.98 * speeds["in turn"]
    assert speeds["outcomes, short"] >= 0.98 * speeds["outcomes, again"]
    assert speeds["outcomes, queued"] >= 0.98 * speeds["outcomes, plain"] > speeds["chain"]


# --- Command


def test_small_run_ends_in_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate_ahead", "--sequences", "8", "--wire-ms", "1", "--max-branches", "4"])
    simulate_ahead.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["strategy"] for row in rows] == list(STRATEGIES)
    assert all(0 < row["of_bound"] <= 1.02 and row["branches"] <= 4 for row in rows)
