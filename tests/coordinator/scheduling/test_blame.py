"""When a sequence is tried alone, when it is given up, and when it is trusted again."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.blame import FAILURES_TO_FAIL, FAILURES_TO_ISOLATE, MAX_CACHE_MISSES, Blame


def test_failures_at_one_point_make_a_suspect_and_then_end_it() -> None:
    suspicion, seen = Blame(), []
    for _ in range(FAILURES_TO_FAIL):
        seen.append((suspicion.is_suspect, suspicion.reason_to_fail))
        suspicion.record_failure((5, 0))
    assert seen == [(failures >= FAILURES_TO_ISOLATE, None) for failures in range(FAILURES_TO_FAIL)]
    assert str(FAILURES_TO_FAIL) in (suspicion.reason_to_fail or "")


def test_lost_caches_end_it_too_but_only_many() -> None:
    suspicion = Blame()
    for _ in range(MAX_CACHE_MISSES - 1):
        suspicion.record_cache_miss((5, 4))
        suspicion.clear((5, 4))
    assert (suspicion.is_suspect, suspicion.reason_to_fail) == (False, None)
    suspicion.record_cache_miss((5, 4))
    assert "lost the cache" in (suspicion.reason_to_fail or "")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3))
def test_progress_beyond_every_failure_clears_and_less_does_not(points: list[tuple[int, int]]) -> None:
    suspicion = Blame()
    for point in points:
        suspicion.record_failure(point)
    suspicion.clear(max(points))
    assert suspicion.failures == len(points)
    length, cached = max(points)
    suspicion.clear((length, cached + 1))
    assert suspicion.failures == 0
