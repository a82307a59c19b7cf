"""The feed of cached pages: what subscribers read, and when they start over."""

import pytest

from coordinator.scheduling import cache_events
from coordinator.scheduling.cache_events import CachedPage, CacheEvents, Change

OURS, THEIRS = ("us", ""), ("them", "")


@pytest.fixture
def events() -> CacheEvents:
    """Three pages of ours, of which two follow the first; one page of theirs."""
    found = CacheEvents()
    found.stored(OURS, None, b"a", [1, 2])
    found.stored(OURS, b"a", b"b", [3, 4])
    found.stored(THEIRS, None, b"x", [9, 9])
    found.stored(OURS, b"a", b"c", [5, 6])
    return found


def names(changes: list[Change]) -> list[bytes]:
    """The digests of stored pages, and those of removed pages after a "-"."""
    return [each.digest if isinstance(each, CachedPage) else b"-" + each for each in changes]


def test_subscriber_reads_all_pages_and_then_changes(events: CacheEvents) -> None:
    woken: list[None] = []
    with events.subscribe(OURS, lambda: woken.append(None)) as subscription:
        starts_over, pages = subscription.read()
        assert starts_over
        assert [(each.parent, each.digest, list(each.token_ids)) for each in pages] == [
            (None, b"a", [1, 2]), (b"a", b"b", [3, 4]), (b"a", b"c", [5, 6]),
        ]  # fmt: skip
        assert subscription.read() == (False, [])
        assert not woken
        events.removed(b"b")
        events.stored(OURS, b"c", b"d", [7, 8])
        assert len(woken) == 2
        starts_over, changes = subscription.read()
        assert (starts_over, names(changes)) == (False, [b"-b", b"d"])
        assert subscription.read() == (False, [])


def test_subscriber_sees_its_own_namespace_only(events: CacheEvents) -> None:
    woken: list[None] = []
    with events.subscribe(OURS, lambda: woken.append(None)) as subscription:
        subscription.read()
        events.removed(b"x")
        events.stored(THEIRS, None, b"y", [8, 8])
        assert (subscription.read(), woken) == ((False, []), [])
    with events.subscribe(THEIRS, lambda: None) as subscription:
        assert names(subscription.read()[1]) == [b"y"]


def test_page_remains_until_the_last_worker_has_evicted_it(events: CacheEvents) -> None:
    with events.subscribe(OURS, lambda: None) as subscription:
        subscription.read()
        events.stored(OURS, b"a", b"b", [3, 4])
        events.removed(b"b")
        assert subscription.read() == (False, [])
        events.removed(b"b")
        assert subscription.read() == (False, [b"b"])


def test_pages_follow_the_page_before_them(events: CacheEvents) -> None:
    """A page without the one before it is out of reach, so a new subscriber does not see it."""
    events.removed(b"a")
    with events.subscribe(OURS, lambda: None) as subscription:
        assert subscription.read() == (True, [])
    events.stored(OURS, None, b"a", [1, 2])
    with events.subscribe(OURS, lambda: None) as subscription:
        assert names(subscription.read()[1]) == [b"a", b"b", b"c"]


def test_slow_subscriber_starts_over(events: CacheEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "MAX_UNREAD", 2)
    with events.subscribe(OURS, lambda: None) as slow, events.subscribe(OURS, lambda: None) as fast:
        slow.read()
        fast.read()
        for number in range(4):
            events.stored(OURS, None, bytes([number]), [number] * 2)
            assert names(fast.read()[1]) == [bytes([number])]
        starts_over, pages = slow.read()
        assert (starts_over, len(pages)) == (True, 7)
        assert slow.read() == (False, [])


def test_ended_subscription_gets_no_more_changes(events: CacheEvents) -> None:
    with events.subscribe(OURS, lambda: None) as subscription:
        subscription.read()
    events.removed(b"b")
    assert subscription.read() == (False, [])
