"""Hidden states between two workers: which are kept, sent and asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.features import (
    MAX_STORED_BYTES,
    FeatureStore,
    limit_propose_items,
    limit_verify_items,
)
from specpool.protocol.features import MAX_FEATURE_BYTES, FeatureSpec, WantedFeatures
from specpool.protocol.rounds import MAX_LOOKUP_TOKENS, ProposeItem, VerifyItem

SPEC = FeatureSpec((1, 2), 2)
WINDOW = 5


def rows(begin: int, end: int) -> bytes:
    """Recognizable states of positions."""
    return b"".join(position.to_bytes(SPEC.row_bytes, "little") for position in range(begin, end))


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()).filter(lambda step: step[1] or step[0] == 0),
        max_size=20,
    )
)
def test_store_returns_the_states_of_the_positions_asked_for(steps: list[tuple[int, int, bool]]) -> None:
    """Steps skip some positions, add some, and may be read."""
    store, end = FeatureStore(WantedFeatures(SPEC, WINDOW)), 0
    for skipped, added, is_read in steps:
        begin, end = end + skipped, end + skipped + added
        store.add(rows(begin, end), end)
        assert store.first >= end - WINDOW - MAX_LOOKUP_TOKENS
        assert store.first <= store.first_unread <= end
        assert store.first == end or not skipped or store.first == begin
        length = end + 1  # the last token has no state yet
        assert store.is_due(length) == (store.first < end)
        assert not store.is_due(length + 1)
        for base in range(max(0, store.first - 2), length):
            features = store.before(base, length)
            assert features == rows(max(base - 1, store.first), end)
        unread = store.first_unread
        if is_read:
            store.mark_read(length)
            assert store.first_unread == end
            store.mark_lost()
            assert store.first_unread == store.first <= unread
            store.mark_read(length)


def test_requests_stay_within_the_limit_of_a_message() -> None:
    spec = FeatureSpec((1,), 2**20)
    room = MAX_FEATURE_BYTES // spec.row_bytes
    items = [VerifyItem(i, 0, (1,) * 4, want_features=True) for i in range(6)]
    limit_verify_items(items, WantedFeatures(spec, 4))
    assert [item.want_features for item in items] == [4 * (i + 1) <= room for i in range(6)]
    proposals = [ProposeItem(i, 0, (1,), features=bytes(MAX_FEATURE_BYTES // 2)) for i in range(3)]
    limit_propose_items(proposals)
    assert [bool(item.features) for item in proposals] == [True, True, False]


@pytest.mark.parametrize("window", [1, WINDOW])
def test_prompts_have_no_more_states_than_the_window(window: int) -> None:
    item = VerifyItem(1, 0, (1,) * 9, want_features=True)
    assert item.num_features(window, 3) == window + 3
    item.want_features = False
    assert item.num_features(window, 3) == 0


def test_a_store_is_bounded_in_bytes() -> None:
    wide = FeatureSpec((1,), 2**19)
    store = FeatureStore(WantedFeatures(wide, 64))
    for position in range(10):
        store.add(bytes(wide.row_bytes), position + 1)
    assert store.first == 10 - MAX_STORED_BYTES // wide.row_bytes
