"""When a sequence is tried alone, when it is given up, and when it is trusted again."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.suspicion import FAILURES_IN_ALL, FAILURES_IN_COMPANY, MOST_MISSES, Suspicion


def test_failures_at_one_point_make_a_suspect_and_then_end_it() -> None:
    suspicion, seen = Suspicion(), []
    for _ in range(FAILURES_IN_ALL):
        seen.append((suspicion.is_suspect, suspicion.verdict))
        suspicion.failed((5, 0))
    assert seen == [(failures >= FAILURES_IN_COMPANY, None) for failures in range(FAILURES_IN_ALL)]
    assert str(FAILURES_IN_ALL) in (suspicion.verdict or "")


def test_lost_caches_end_it_too_but_only_many() -> None:
    suspicion = Suspicion()
    for _ in range(MOST_MISSES - 1):
        suspicion.missed((5, 4))
        suspicion.clear((5, 4))
    assert (suspicion.is_suspect, suspicion.verdict) == (False, None)
    suspicion.missed((5, 4))
    assert "lost the cache" in (suspicion.verdict or "")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3))
def test_progress_beyond_every_failure_clears_and_less_does_not(points: list[tuple[int, int]]) -> None:
    suspicion = Suspicion()
    for point in points:
        suspicion.failed(point)
    suspicion.clear(max(points))
    assert suspicion.failures == len(points)
    length, cached = max(points)
    suspicion.clear((length, cached + 1))
    assert suspicion.failures == 0
