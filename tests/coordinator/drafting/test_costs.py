"""Step times: passes that are cut in pieces are added up, and each piece learns its own share of a round's time."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.drafting.costs import MAX_GROWTH, MIN_SECONDS, UNKNOWN_VERIFY, StepTimes

MEASURED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIRST, MORE = 0.02, 0.0006


class CuttingWorker:
    """A worker whose passes have at most `max_rows` rows: the seconds of a pass are on a straight line."""

    def __init__(self, max_rows: int, first: float = FIRST, more: float = MORE, noise: float = 0.0) -> None:
        self.max_rows, self._first, self._more, self._noise = max_rows, first, more, noise
        self._rng = random.Random(0)

    def seconds(self, rows: int) -> float:
        """Seconds of a round, as they are on average."""
        passes = -(-rows // self.max_rows)
        return passes * (self._first - self._more) + rows * self._more

    def observed(self, rows: int) -> float:
        """Seconds of a round, as they happen to be."""
        return self.seconds(rows) * self._rng.uniform(1 - self._noise, 1 + self._noise)

    def measured(self, rows: Sequence[int] = MEASURED, busy: float = 1.0) -> StepTimes:
        """What it tells when it starts, on a machine on which passes then take `busy` times as long."""
        numbers = {1, *(n for n in rows if n < self.max_rows), max(2, self.max_rows)}
        return StepTimes({n: busy * self.seconds(n) for n in numbers}, max_rows=self.max_rows)


limits = st.integers(1, 256)
rounds = st.lists(
    st.tuples(
        st.integers(-1, 2000), st.sampled_from([0.0, -1.0, 1e-9, 0.001, 5.0, 1e300, math.inf, -math.inf, math.nan])
    ),
    max_size=30,
)


@given(limit=limits, rows=st.integers(1, 1500))
def test_a_round_is_its_full_passes_and_the_rest(limit: int, rows: int) -> None:
    worker = CuttingWorker(limit)
    assert worker.measured()(rows) == pytest.approx(worker.seconds(rows))


@given(rows=st.integers(1, 1500))
def test_without_a_limit_every_round_is_one_pass(rows: int) -> None:
    assert StepTimes({1: 0.02, 64: 0.083})(rows) == pytest.approx(0.02 + 0.001 * (rows - 1))


@given(
    points=st.dictionaries(st.integers(1, 600), st.floats(allow_nan=True, allow_infinity=True), min_size=2, max_size=8),
    per_cached=st.sampled_from([0.0, 1e-6, -1.0, math.nan]),
    limit=st.integers(0, 300),
    passes=rounds,
)
def test_whatever_is_fed_times_are_positive_and_grow_with_the_rows(
    points: dict[int, float], per_cached: float, limit: int, passes: list[tuple[int, float]]
) -> None:
    times = StepTimes(points, cached=100, per_cached=per_cached, max_rows=limit)
    for rows, seconds in passes:
        times.cached = 100 + abs(rows)
        times.observe(rows, seconds)
    believed = [times(rows) for rows in range(1, 700)]
    assert all(map(math.isfinite, believed))
    assert believed[0] >= MIN_SECONDS
    assert all(more >= fewer * (1 - 1e-9) for fewer, more in pairwise(believed))


@given(
    points=st.dictionaries(st.integers(1, 600), st.floats(1e-4, 10), min_size=2, max_size=8),
    passes=st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-4, 10)), max_size=30),
)
def test_more_rows_never_take_much_more_time_per_row_in_one_pass(
    points: dict[int, float], passes: list[tuple[int, float]]
) -> None:
    times = StepTimes(points)
    for rows, seconds in passes:
        times.observe(rows, seconds)
    per_row = [seconds / rows for rows, seconds in times.points.items()]
    assert all(later <= earlier * MAX_GROWTH * (1 + 1e-9) for earlier, later in pairwise(per_row))


def test_a_step_in_the_times_is_believed() -> None:
    """The first row of another tile costs more than the mean of all rows before it."""
    measured = {8: 14.8e-3, 9: 18.5e-3, 12: 24.1e-3, 16: 27.1e-3}
    assert StepTimes(measured).points == measured


@pytest.mark.parametrize("limit", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("busy", [0.6, 1.0, 1.8])
def test_after_rounds_of_many_sizes_a_worker_that_cuts_passes_is_predicted(limit: int, busy: float) -> None:
    """Even where it was measured on a busy machine."""
    worker, rng = CuttingWorker(limit, noise=0.1), random.Random(1)
    times = worker.measured(busy=busy)
    for _ in range(300):
        rows = rng.choice([1, 4, 17, 40, 65, 129, rng.randint(1, 400)])
        times.observe(rows, worker.observed(rows))
    for rows in (1, 2, 8, 16, 40, 64, 65, 100, 130, 272, 400):
        assert times(rows) == pytest.approx(worker.seconds(rows), rel=0.08), rows


@pytest.mark.parametrize("limit", [2, 16, 64])
@pytest.mark.parametrize("sizes", [(272, 272, 272), (65, 129, 130), (300, 201, 1000, 64)])
@pytest.mark.parametrize("count", [3, 200])
def test_one_row_is_believed_rightly_though_only_large_rounds_are_seen(
    limit: int, sizes: tuple[int, ...], count: int
) -> None:
    worker = CuttingWorker(limit, noise=0.1)
    times = worker.measured()
    for number in range(count):
        rows = sizes[number % len(sizes)]
        times.observe(rows, worker.observed(rows))
    assert times(1) == pytest.approx(FIRST, rel=0.1)


def test_a_machine_that_was_busy_at_the_start_is_found_out_by_large_rounds() -> None:
    worker = CuttingWorker(64)
    times = worker.measured(busy=3.0)
    for _ in range(20):
        times.observe(272, worker.seconds(272))
    assert times(1) == pytest.approx(FIRST, rel=0.05)


def test_rounds_beyond_all_that_was_measured_do_not_spoil_what_was() -> None:
    """Where an older worker does not tell how it cuts passes."""
    worker = CuttingWorker(64)
    times = StepTimes({n: worker.seconds(n) for n in (1, 2, 4, 8, 16, 32, 64)})
    for _ in range(3):
        times.observe(512, worker.seconds(512))
    assert times(1) == pytest.approx(FIRST, rel=0.05)
    for _ in range(20):
        times.observe(512, worker.seconds(512))
    assert times(1) == pytest.approx(FIRST, rel=0.05)
    assert times(512) == pytest.approx(worker.seconds(512), rel=0.05)


def test_what_nobody_measured_is_corrected_by_every_round() -> None:
    times = StepTimes(UNKNOWN_VERIFY)
    for _ in range(40):
        times.observe(200, 4 * UNKNOWN_VERIFY[64])
        times.observe(8, 4 * UNKNOWN_VERIFY[1])
    assert times(200) == pytest.approx(4 * UNKNOWN_VERIFY[64], rel=0.1)
    assert times(8) == pytest.approx(4 * UNKNOWN_VERIFY[1], rel=0.1)


def test_the_passes_of_a_round_share_its_time() -> None:
    """Draft steps: eight passes, which are observed together, and twice as slow as believed."""
    worker = CuttingWorker(64, first=0.002, more=0.0001)
    times, steps = worker.measured(busy=0.5), [16, 16, 12, 12, 8, 4, 2, 1]
    for _ in range(3):
        times.observe_steps(steps, sum(map(worker.seconds, steps)))
    assert sum(map(times, steps)) == pytest.approx(sum(map(worker.seconds, steps)), rel=0.02)
    assert times(1) == pytest.approx(worker.seconds(1), rel=0.05)
    assert times(16) == pytest.approx(worker.seconds(16), rel=0.05)


def test_one_stalled_round_changes_little_of_what_many_rounds_have_shown() -> None:
    worker = CuttingWorker(64)
    times = worker.measured()
    for _ in range(100):
        times.observe(40, worker.seconds(40))
    times.observe(40, 100 * worker.seconds(40))
    assert times(40) < 2 * worker.seconds(40)
