"""Simulated faults: no token is wrong, lost or doubled, every request ends, and nothing holds a slot."""

import os
import random
import subprocess
import sys
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


@pytest.mark.parametrize("method", ["prediction", "best"])
def test_wrong_predictions_barely_delay_other_clients(method: str) -> None:
    rng = random.Random(method)
    wrong = tuple(rng.choices(range(EOS), k=LONG_PREDICTION))  # each token occurs in it, and something follows

    def seconds(prediction: tuple[int, ...]) -> float:
        """Total time of alice's requests while bob's run beside them."""
        requests = [
            Request(0.0, f"{client}-{number}", (*wrong[:40], number), 60, client, method=method, prediction=tokens)
            for client, tokens in (("alice", ()), ("bob", prediction))
            for number in range(4)
        ]
        target = WorkerSetup("target", "10.0.0.1:1", 8, 160, 8 * 160, "cuda:0", 0.01, 0.001)
        result = simulate(Scenario(1, ToyPair(0.7, 0.0), (target,), {"max_num_seqs": 8}, tuple(requests)))
        assert not result.violations
        return result.seconds["alice"]

    assert seconds(wrong) < 1.05 * seconds(())


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
