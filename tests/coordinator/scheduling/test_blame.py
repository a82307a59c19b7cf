"""Poison-request detection: when a sequence runs alone, when it fails, and when it is trusted again."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.records import FAILURES_TO_FAIL, FAILURES_TO_ISOLATE, MAX_CACHE_MISSES, Blame


def test_repeated_failures_isolate_a_sequence_and_then_fail_it() -> None:
    blame, seen = Blame(), []
    for _ in range(FAILURES_TO_FAIL):
        seen.append((blame.is_suspect, blame.reason_to_fail))
        blame.record_failure((5, 0))
    assert seen == [(failures >= FAILURES_TO_ISOLATE, None) for failures in range(FAILURES_TO_FAIL)]
    assert str(FAILURES_TO_FAIL) in (blame.reason_to_fail or "")


def test_a_failure_can_be_taken_back() -> None:
    blame = Blame()
    blame.record_failure((5, 0))
    blame.forgive()
    blame.forgive()
    assert blame.failures == 0


def test_many_cache_misses_without_progress_fail_a_sequence() -> None:
    blame = Blame()
    for _ in range(MAX_CACHE_MISSES - 1):
        blame.record_cache_miss((5, 4))
        blame.clear((5, 4))
    assert (blame.is_suspect, blame.reason_to_fail) == (False, None)
    blame.record_cache_miss((5, 4))
    assert "lost the cache" in (blame.reason_to_fail or "")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3))
def test_only_progress_beyond_every_failure_clears(points: list[tuple[int, int]]) -> None:
    blame = Blame()
    for point in points:
        blame.record_failure(point)
    blame.clear(max(points))
    assert blame.failures == len(points)
    length, cached = max(points)
    blame.clear((length, cached + 1))
    assert blame.failures == 0
