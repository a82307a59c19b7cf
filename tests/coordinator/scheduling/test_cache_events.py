"""The feed of cached pages: what subscribers read, and when they start over."""

from collections.abc import Sequence as Items
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling import cache_events
from coordinator.scheduling.cache_events import CachedPage, CacheEvents, Change
from coordinator.scheduling.prefixes import PrefixIndex
from coordinator.scheduling.sequence import GenerationRequest, Sequence

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


def names(changes: Items[Change]) -> list[bytes]:
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


operations = st.one_of(
    st.tuples(
        st.just("run"), st.integers(0, 1), st.lists(st.integers(0, 1), max_size=9), st.sampled_from(["us", "them"])
    ),
    st.tuples(st.just("evict"), st.integers(0, 1), st.integers(0, 20)),
    st.tuples(st.just("clear"), st.integers(0, 1)),
)


@given(done=st.lists(operations, max_size=30), read_after=st.sets(st.integers(0, 29)))
def test_subscriber_knows_the_pages_of_all_targets(done: list[Any], read_after: set[int]) -> None:
    """Two targets with at most four pages of two tokens each."""
    events = CacheEvents()
    indexes = [PrefixIndex(2, max_pages=4, events=events) for _ in range(2)]
    known: dict[bytes, CachedPage] = {}
    with events.subscribe(OURS, lambda: None) as subscription:

        def read() -> None:
            starts_over, changes = subscription.read()
            if starts_over:
                known.clear()
            for change in changes:
                if isinstance(change, CachedPage):
                    assert change.digest not in known
                    known[change.digest] = change
                else:
                    del known[change]

        read()
        for number, (kind, target, *arguments) in enumerate(done):
            run_operation(indexes[target], kind, number, *arguments)
            if number in read_after:
                read()
        read()
    cached = {digest for index in indexes for digest in index._cached}
    assert cached == set(events._pages)
    assert known == {digest: page for digest, page in events._pages.items() if page.namespace == OURS}


def run_operation(index: PrefixIndex, kind: str, number: int, *arguments: Any) -> None:
    if kind == "run":
        token_ids, client = arguments
        sequence = Sequence(number, GenerationRequest(str(number), tuple(token_ids), 9, frozenset(), 0, client=client))
        index.add(sequence)
        sequence.target.commit(len(token_ids))
        index.commit(sequence)
        index.discard(sequence)
    elif kind == "evict":
        index.evict(list(index._cached)[arguments[0] :][:1])
    else:
        index.clear()


def test_pages_of_a_sequence_follow_each_other() -> None:
    events = CacheEvents()
    index = PrefixIndex(2, events=events)
    run_operation(index, "run", 1, [1, 2, 3, 4, 5], "us")
    run_operation(index, "run", 2, [1, 2, 7, 8], "us")
    with events.subscribe(OURS, lambda: None) as subscription:
        pages = [page for page in subscription.read()[1] if isinstance(page, CachedPage)]
    first = pages[0].digest
    assert [(each.parent, list(each.token_ids)) for each in pages] == [(None, [1, 2]), (first, [3, 4]), (first, [7, 8])]
