"""Clients get their shares of worker time. Rounds take as long as measured on the embedded pair with 2 cores."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.scheduling.worker_time import MAX_LAG, Part, WorkerTime

BASE, ROW = 0.011, 0.001
"""Seconds of a round, and of each of its rows."""


@dataclass(frozen=True)
class Load:
    """A client that always has work."""

    rows: int
    costly: float = 0.0
    """Extra seconds of each row."""

    @property
    def part(self) -> Part:
        return Part(self.rows, self.rows if self.costly else 0)

    @property
    def alone(self) -> float:
        return pass_seconds(self.rows) + self.rows * self.costly


def pass_seconds(rows: float) -> float:
    return BASE + ROW * rows if rows else 0.0


def simulate(loads: dict[str, Load], rounds: int = 600, slowdown: float = 1.0) -> tuple[dict[str, float], float]:
    """Return each client's speed, relative to its speed alone, and the share of all rows that took part."""
    shares, elapsed, served = WorkerTime(), 0.0, Counter[str]()
    for _ in range(rounds):
        names = shares.may_run(loads)
        assert names, "nobody may run"
        parts = {name: loads[name].part for name in names}
        costly = sum(loads[name].rows * loads[name].costly for name in names)
        seconds = slowdown * (pass_seconds(sum(part.rows for part in parts.values())) + costly)
        shares.add_round(parts, seconds, pass_seconds, loads)
        elapsed += seconds
        served.update(names)
    speeds = {name: served[name] * slowdown * load.alone / elapsed for name, load in loads.items()}
    full = sum(served[name] * load.rows for name, load in loads.items())
    return speeds, full / (rounds * sum(load.rows for load in loads.values()))


def test_equal_rows_share_full_batches() -> None:
    speeds, full = simulate({"many": Load(12), "few": Load(4)})
    assert full > 0.99
    assert min(speeds.values()) > 0.5
    speeds, full = simulate({name: Load(1) for name in "abcdefghijklmnop"})
    assert full == 1


@pytest.mark.parametrize("costly", [0.003, 0.0123], ids=["sampled", "rules and log-probabilities"])
def test_a_client_with_few_plain_rows_keeps_half_its_speed_beside_many_costly_ones(costly: float) -> None:
    speeds, _ = simulate({"many": Load(12, costly), "few": Load(4)})
    assert speeds["few"] == pytest.approx(0.5, abs=0.06)
    assert speeds["many"] >= 0.5, "nothing is lost: both have half, and more where they share rounds"


def test_cheap_clients_run_beside_those_that_are_behind() -> None:
    speeds, _ = simulate({"costly": Load(12, 0.012), "few": Load(4), "one": Load(1)})
    assert min(speeds.values()) >= 1 / 3 - 0.02


@settings(max_examples=60)
@given(
    loads=st.dictionaries(
        st.sampled_from("abcdef"),
        st.builds(Load, st.integers(1, 16), st.sampled_from([0.0, 0.0, 0.001, 0.003])),
        min_size=1,
    )
)
def test_every_client_gets_its_share(loads: dict[str, Load]) -> None:
    """1/n of its speed alone, whatever the others cost, if its own costs are known."""
    speeds, _ = simulate(loads)
    for name in loads:
        if len({load.costly for load in loads.values()} - {0.0}) < 2:
            assert speeds[name] >= 0.85 / len(loads), name
    assert all(speed > 0 for speed in speeds.values())


def test_a_client_that_comes_back_runs_first() -> None:
    shares, heavy = WorkerTime(), Part(12, 12)
    for _ in range(10):
        shares.add_round({"heavy": heavy}, 0.15, pass_seconds, {"heavy"})
    assert shares.may_run({"heavy", "new"}) == {"new"}
    assert shares.may_run({"heavy"}) == {"heavy"}


@pytest.mark.parametrize("rounds", [0, 100])
def test_a_stalled_pass_keeps_no_client_out_for_long(rounds: int) -> None:
    shares, parts = WorkerTime(), {"costly": Part(12, 12), "plain": Part(4)}
    for _ in range(rounds):
        shares.add_round(parts, 0.06, pass_seconds, parts)
    shares.add_round(parts, 30.0, pass_seconds, parts)
    missed = 0
    while shares.may_run(parts) != set(parts):
        missed += 1
        shares.add_round({"plain": Part(4)}, pass_seconds(4), pass_seconds, parts)
    assert missed < 30


def test_pauses_do_not_pay_for_long_work() -> None:
    """A client that works for 20 rounds and pauses for one gets about its share."""
    loads, shares, seconds_of = {"costly": Load(12, 0.012), "bursts": Load(12, 0.012)}, WorkerTime(), Counter[str]()
    for number in range(2_000):
        active = {"costly"} if number % 21 == 20 else set(loads)
        names = shares.may_run(active)
        parts = {name: loads[name].part for name in names}
        seconds = pass_seconds(12 * len(names)) + 12 * 0.012 * len(names)
        shares.add_round(parts, seconds, pass_seconds, active)
        for name in names:
            seconds_of[name] += loads[name].alone
    assert seconds_of["bursts"] <= 1.1 * seconds_of["costly"]


def test_lags_are_bounded_and_forgotten() -> None:
    shares = WorkerTime()
    for _ in range(100):
        shares.add_round({"heavy": Part(12, 12)}, 0.1, pass_seconds, {"heavy", "waiting"})
    assert shares._lags["waiting"] == pytest.approx(MAX_LAG * 0.1)
    for _ in range(100):
        shares.add_round({"heavy": Part(12, 12)}, 0.1, pass_seconds, {"heavy"})
    assert set(shares._lags) == {"heavy"}, "the whole credit of an idle client needs no entry"
    for _ in range(100):
        shares.add_round({}, 0.1, pass_seconds, {"other"})
    assert set(shares._lags) == {"other"}
    assert shares._costs == {}
    assert shares.may_run([]) == set()
