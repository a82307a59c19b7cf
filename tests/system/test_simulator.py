"""Simulated faults: no token is wrong, lost or doubled, every request ends, and nothing holds a slot."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest
from simulator.lookups import LONG_PREDICTION
from simulator.model import EOS, ToyPair
from simulator.planted import BUGS
from simulator.scenario import draw
from simulator.setup import Request, Scenario, WorkerSetup
from simulator.shrinking import shrink
from simulator.simulation import simulate, simulate_all

from coordinator.serving.auditor import EQUAL

SEEDS_PER_TEST = 10
MAX_SEEDS = 60
"""Seeds within which each planted bug must be found: at most a minute on one core."""
FOLDER = Path(__file__).parent


def fails(scenario: Scenario) -> bool:
    return bool(simulate(scenario).violations)


def check(first: int, number: int) -> None:
    totals, failed = simulate_all(map(draw, range(first, first + number)))
    assert failed is None, f"{totals.violations}; make simulate SEEDS={failed.seed}"
    assert totals.audits[EQUAL] > 0


def test_service_withstands_simulated_faults() -> None:
    check(0, SEEDS_PER_TEST)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS_PER_TEST, 200, 2 * SEEDS_PER_TEST))
def test_service_withstands_many_simulated_faults(first: int) -> None:
    check(first, 2 * SEEDS_PER_TEST)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: str) -> None:
    with BUGS[bug]():
        assert any(fails(draw(seed)) for seed in range(MAX_SEEDS))


def _random_prediction(answer: Sequence[int]) -> tuple[int, ...]:
    """Return a prediction that contains every token, so that each last token has a continuation."""
    return tuple(random.Random(0).choices(range(EOS), k=LONG_PREDICTION))


def _half_right_prediction(answer: Sequence[int]) -> tuple[int, ...]:
    """Return a prediction with 8 right tokens, after which every second token is wrong."""
    return tuple(token if i < 8 or i % 2 else (token + 1) % EOS for i, token in enumerate(answer))


@pytest.mark.parametrize("predict", [_random_prediction, _half_right_prediction])
@pytest.mark.parametrize("method", ["prediction", "best"])
def test_wrong_predictions_barely_delay_other_clients(
    method: str, predict: Callable[[Sequence[int]], tuple[int, ...]]
) -> None:
    pair = ToyPair(0.7, 0.0)

    def seconds(is_wrong: bool) -> float:
        """Return the total time of alice's requests while bob's run beside them."""
        requests = []
        for number in range(8):
            client, prompt = ("alice", "bob")[number % 2], tuple(range(number, 40 + number))
            prediction = predict(pair.answer(prompt, 60, 0)) if is_wrong and client == "bob" else ()
            requests.append(Request(0.0, f"request-{number}", prompt, 60, client, method=method, prediction=prediction))
        target = WorkerSetup("target", "10.0.0.1:1", 8, 160, 8 * 160, "cuda:0", 0.01, 0.001)
        result = simulate(Scenario(1, pair, (target,), {"max_num_seqs": 8}, tuple(requests)))
        assert not result.violations
        return result.seconds["alice"]

    # The server starts cold, and has to learn that the predictions are wrong.
    assert seconds(is_wrong=True) < 1.1 * seconds(is_wrong=False)


@pytest.mark.parametrize(
    ("share", "step_seconds", "agreement"), [("new=0.1", 0.001, 0.0), ("new=0.1", 0.03, 0.8), (None, 0.008, 0.0)]
)
def test_a_bad_canary_costs_little_more_than_its_own_drafts(
    share: str | None, step_seconds: float, agreement: float
) -> None:
    """Its tokens are wrong, or it is many times slower than the current draft."""

    def seconds(canary: WorkerSetup | None) -> float:
        workers = [
            WorkerSetup("target", "10.0.0.1:1", 16, 160, 16 * 160, "cuda:0", 0.01, 0.0001),
            WorkerSetup("draft", "10.0.0.1:11", 16, 160, 16 * 160, "cuda:1", 0.001, 0.00002, name="current"),
        ]
        workers += [] if canary is None else [canary]
        requests = [
            Request(0.0, f"request-{number}", tuple(range(number, number + 20)), 60, method="model")
            for number in range(96)
        ]
        settings = {"max_num_seqs": 16, "overlap": "on", "draft_share": share if canary else None}
        result = simulate(Scenario(1, ToyPair(0.8, 0.0), tuple(workers), settings, tuple(requests)))
        assert not result.violations
        return sum(result.seconds.values())

    canary = WorkerSetup(
        "draft", "10.0.0.1:12", 16, 160, 16 * 160, "cuda:1", step_seconds, step_seconds / 50,
        weights=("another",), name="new", agreement=agreement,
    )  # fmt: skip
    assert seconds(canary) < 1.25 * seconds(None)


@pytest.mark.slow
def test_failing_scenario_shrinks() -> None:
    with BUGS["a skipped round check"]():
        scenario = next(scenario for scenario in map(draw, count()) if fails(scenario))
        smaller = shrink(scenario, fails)
        assert fails(smaller)
        assert 2 <= len(smaller.events) <= 4, smaller.events
    assert not fails(smaller)


@pytest.mark.slow
def test_same_seed_gives_the_same_messages() -> None:
    """In another process with another order of sets of strings."""
    path = os.pathsep.join([*sys.path, str(FOLDER)])
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "simulator", "--seeds", "2"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert output.partition("digest ")[2].split()[0] == simulate_all(map(draw, (2,)))[0].digest
