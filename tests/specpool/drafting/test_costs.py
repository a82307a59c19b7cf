"""Step times: rounds are split into passes, and the total time of a round corrects the estimates."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpool.drafting.costs import MAX_GROWTH, MAX_SECONDS, RoundCosts, StepTimes

MEASURED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIRST, MORE = 0.02, 0.0006


class SplittingWorker:
    """A worker with passes of at most `max_rows` rows, each of linear cost."""

    def __init__(self, max_rows: int, first: float = FIRST, more: float = MORE, noise: float = 0.0) -> None:
        self.max_rows, self._first, self._more, self._noise = max_rows, first, more, noise
        self._rng = random.Random(0)

    def seconds(self, rows: int) -> float:
        """Mean seconds of a round."""
        passes = -(-rows // self.max_rows)
        return passes * (self._first - self._more) + rows * self._more

    def observed(self, rows: int) -> float:
        """Seconds of a round, with noise."""
        return self.seconds(rows) * self._rng.uniform(1 - self._noise, 1 + self._noise)

    def measured(self, rows: Sequence[int] = MEASURED, busy: float = 1.0) -> StepTimes:
        """Its measurements at start, on a machine that takes `busy` times as long."""
        numbers = {1, *(n for n in rows if n < self.max_rows), max(2, self.max_rows)}
        return StepTimes({n: busy * self.seconds(n) for n in numbers}, max_rows=self.max_rows)


rounds = st.lists(
    st.tuples(
        st.integers(-1, 2000), st.sampled_from([0.0, -1.0, 1e-9, 0.001, 5.0, 1e300, math.inf, -math.inf, math.nan])
    ),
    max_size=30,
)


@given(limit=st.integers(1, 256), rows=st.integers(1, 1500))
def test_a_round_consists_of_full_passes_and_the_rest(limit: int, rows: int) -> None:
    worker = SplittingWorker(limit)
    assert worker.measured()(rows) == pytest.approx(worker.seconds(rows))


def test_longer_sequences_make_each_row_more_expensive() -> None:
    times = StepTimes({1: 0.02, 64: 0.05}, cached=100, per_cached=1e-6)
    before = times(4), times(5) - times(4)
    times.cached = 2100
    assert times(4) == pytest.approx(before[0] + 4 * 0.002)
    assert times(5) - times(4) == pytest.approx(before[1] + 0.002)
    for _ in range(50):
        times.observe(4, before[0] + 4 * 0.002)
    assert times.points == pytest.approx({1: 0.02, 64: 0.05}), "the cost of length is not an error of the points"


@given(
    points=st.dictionaries(st.integers(1, 600), st.floats(allow_nan=True, allow_infinity=True), min_size=2, max_size=8),
    per_cached=st.sampled_from([0.0, 1e-6, -1.0, math.nan]),
    limit=st.integers(0, 300),
    passes=rounds,
)
def test_times_stay_finite_positive_and_monotonic_for_any_input(
    points: dict[int, float], per_cached: float, limit: int, passes: list[tuple[int, float]]
) -> None:
    times = StepTimes(points, cached=100, per_cached=per_cached, max_rows=limit)
    for rows, seconds in passes:
        times.cached = 100 + abs(rows)
        times.observe(rows, seconds)
    estimates = [times(rows) for rows in range(1, 700)]
    assert all(map(math.isfinite, estimates))
    assert estimates[0] >= 1 / MAX_SECONDS
    assert all(more >= fewer * (1 - 1e-9) for fewer, more in pairwise(estimates))


@given(
    points=st.dictionaries(st.integers(1, 600), st.floats(1e-4, 10), min_size=2, max_size=8),
    passes=st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-4, 10)), max_size=30),
)
def test_time_per_row_barely_grows(points: dict[int, float], passes: list[tuple[int, float]]) -> None:
    times = StepTimes(points)
    for rows, seconds in passes:
        times.observe(rows, seconds)
    per_row = [seconds / rows for rows, seconds in times.points.items()]
    assert all(later <= earlier * MAX_GROWTH * (1 + 1e-9) for earlier, later in pairwise(per_row))


def test_a_measured_tile_boundary_is_kept() -> None:
    """The first row of another tile costs more than the mean of all rows before it."""
    measured = {8: 14.8e-3, 9: 18.5e-3, 12: 24.1e-3, 16: 27.1e-3}
    assert StepTimes(measured).points == measured


@pytest.mark.parametrize("limit", [1, 16, 100])
@pytest.mark.parametrize("busy", [0.6, 1.0, 1.8])
def test_rounds_of_many_sizes_correct_measurements_of_a_busy_machine(limit: int, busy: float) -> None:
    worker, rng = SplittingWorker(limit, noise=0.1), random.Random(1)
    times = worker.measured(busy=busy)
    for _ in range(300):
        rows = rng.choice([1, 4, 17, 40, 65, 129, rng.randint(1, 400)])
        times.observe(rows, worker.observed(rows))
    for rows in (1, 2, 8, 16, 40, 64, 65, 100, 130, 272, 400):
        assert times(rows) == pytest.approx(worker.seconds(rows), rel=0.08), rows


@pytest.mark.parametrize("limit", [2, 16, 64])
@pytest.mark.parametrize("sizes", [(272, 272, 272), (65, 129, 130), (300, 201, 1000, 64)])
@pytest.mark.parametrize("count", [3, 200])
def test_large_rounds_keep_the_estimate_of_one_row(limit: int, sizes: tuple[int, ...], count: int) -> None:
    worker = SplittingWorker(limit, noise=0.1)
    times = worker.measured()
    for number in range(count):
        rows = sizes[number % len(sizes)]
        times.observe(rows, worker.observed(rows))
    assert times(1) == pytest.approx(FIRST, rel=0.1)


def test_rounds_beyond_all_points_keep_the_measured_ones() -> None:
    worker = SplittingWorker(64)
    times = StepTimes({n: worker.seconds(n) for n in (1, 2, 4, 8, 16, 32, 64)})
    for count in (3, 20):
        for _ in range(count):
            times.observe(512, worker.seconds(512))
        assert times(1) == pytest.approx(FIRST, rel=0.05)
    assert times(512) == pytest.approx(worker.seconds(512), rel=0.05)


def test_steps_share_the_time_of_their_round() -> None:
    """Eight draft steps observed together, twice as slow as expected."""
    worker = SplittingWorker(64, first=0.002, more=0.0001)
    times, steps = worker.measured(busy=0.5), [16, 16, 12, 12, 8, 4, 2, 1]
    for _ in range(3):
        times.observe_steps(steps, sum(map(worker.seconds, steps)))
    assert sum(map(times, steps)) == pytest.approx(sum(map(worker.seconds, steps)), rel=0.02)
    for rows in (1, 16):
        assert times(rows) == pytest.approx(worker.seconds(rows), rel=0.05)


def test_one_stalled_round_changes_little() -> None:
    worker = SplittingWorker(64)
    times = worker.measured()
    for _ in range(100):
        times.observe(40, worker.seconds(40))
    times.observe(40, 100 * worker.seconds(40))
    assert times(40) < 2 * worker.seconds(40)


def test_plain_rounds_have_their_own_waiting_time() -> None:
    """Seconds between plain passes, which may overlap with messages. By default, one exchange."""
    costs = RoundCosts(StepTimes({1: 0.003, 8: 0.003}), StepTimes({1: 0.02, 8: 0.02}), exchange=0.002)
    assert costs.seconds(1, []) == pytest.approx(0.022)
    costs.plain_exchange = 0.0005
    assert costs.seconds(1, []) == pytest.approx(0.0205)
    assert costs.seconds(1, [1]) == pytest.approx(0.003 + 0.02 + 2 * 0.002), "with a draft worker, no pipelining"
    assert costs.seconds(1, [], num_lookup_tokens=3) == pytest.approx(0.0205)
    costs.scheduling = 0.001
    assert costs.seconds(1, []) == pytest.approx(0.0205)
    assert costs.seconds(1, [1]) == pytest.approx(0.028)
