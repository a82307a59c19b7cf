"""Slots behave like a simple model of them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specpool.engine.cache.extents import Extents
from specpool.engine.cache.slots import IDLE_COORDINATORS, SequenceKey, SlotTable
from specpool.protocol.rounds import ItemStatus

SLOTS = 3
LEASE_SECONDS = 10.0

owners = st.sampled_from(["a", "b", "c"])
keys = st.tuples(owners, st.integers(0, 3))
lengths = st.integers(0, 6)


class SlotMachine(RuleBasedStateMachine):
    """Three coordinators compete for three slots."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(SLOTS)
        self.now = 0.0
        self.held: dict[SequenceKey, tuple[int, int, int]] = {}  # index, cached tokens, round id
        self.released: dict[SequenceKey, tuple[int, int]] = {}  # index, cached tokens; least recently used first
        self.free = set(range(SLOTS))
        self.last_seen: dict[str, float] = {}
        self.orphaned: set[str] = set()

    @rule(key=keys, round_id=st.integers(0, 4), base_length=lengths)
    def realign(self, key: SequenceKey, round_id: int, base_length: int) -> None:
        expected = self._expected(key, round_id, base_length)
        assert self.table.realign(key, round_id, base_length) is expected
        if expected is ItemStatus.OK:
            index = self.held[key][0] if key in self.held else self._take(key)
            self.held[key] = (index, base_length, round_id)

    @rule(key=keys)
    def copy_from(self, key: SequenceKey) -> None:
        """A released sequence can be copied until its slot is needed."""
        slot = self.table.find(key)
        expected = self.released.get(key, self.held.get(key))
        assert (slot and (slot.index, slot.num_cached_tokens)) == (expected and expected[:2])
        if key in self.released:
            self.released[key] = self.released.pop(key)

    def _take(self, key: SequenceKey) -> int:
        if key in self.released:
            self.free.add(self.released.pop(key)[0])
        if self.free:
            index = min(self.free)
            self.free.remove(index)
            return index
        if self.released:
            return self.released.pop(next(iter(self.released)))[0]
        return self.held.pop(self._yielding(key)[0])[0]

    def _yielding(self, key: SequenceKey) -> list[SequenceKey]:
        """Sequences of other, orphaned coordinators, least recently seen first."""
        orphans = [held for held in self.held if held[0] in self.orphaned - {key[0]}]
        return sorted(orphans, key=lambda held: self.last_seen[held[0]])

    @rule(key=keys, round_id=st.integers(0, 4), appended=lengths)
    def serve_a_round(self, key: SequenceKey, round_id: int, appended: int) -> None:
        """Realign to the full cached length, append, and record the new length, as workers do."""
        base_length = self.held[key][1] if key in self.held else 0
        self.realign(key, round_id, base_length)
        if key in self.held and self.held[key][2] == round_id:
            self.table[key].num_cached_tokens += appended
            index, length, _ = self.held[key]
            self.held[key] = (index, length + appended, round_id)

    @rule(released=st.lists(keys, max_size=4))
    def release(self, released: list[SequenceKey]) -> None:
        assert self.table.release(released) == len(set(released) & set(self.held))
        for key in released:
            if key in self.held:
                self.released[key] = self.held.pop(key)[:2]

    @rule(owner=owners)
    def renew_lease(self, owner: str) -> None:
        self.table.renew_lease(owner, self.now)
        self.last_seen[owner] = self.now
        self.orphaned.discard(owner)

    @rule(owner=owners)
    def orphan(self, owner: str) -> None:
        self.table.orphan(owner)
        if owner in self.last_seen:
            self.orphaned.add(owner)

    @rule(seconds=st.sampled_from([0.0, 4.0, LEASE_SECONDS, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        silent = {owner for owner, seen in self.last_seen.items() if self.now - seen > LEASE_SECONDS}
        lost = [key for key in self.held if key[0] in silent]
        assert self.table.expire(self.now, LEASE_SECONDS) == len(lost)
        for key in lost:
            self.free.add(self.held.pop(key)[0])
        for key in [key for key in self.released if key[0] in silent]:
            self.free.add(self.released.pop(key)[0])
        for owner in silent:
            del self.last_seen[owner]
        self.orphaned -= silent

    @invariant()
    def no_slot_is_lost(self) -> None:
        self.table.check_integrity()
        assert self.table.in_use == len(self.held)

    @invariant()
    def slots_match_the_model(self) -> None:
        for key, expected in self.held.items():
            slot = self.table[key]
            assert (slot.index, slot.num_cached_tokens, slot.round_id) == expected

    def _expected(self, key: SequenceKey, round_id: int, base_length: int) -> ItemStatus:
        if key in self.held:
            _, cached, latest = self.held[key]
            if round_id < latest:
                return ItemStatus.STALE_ROUND
            return ItemStatus.OK if base_length <= cached else ItemStatus.CACHE_MISS
        if base_length > 0:
            return ItemStatus.CACHE_MISS
        return ItemStatus.OK if len(self.held) < SLOTS or self._yielding(key) else ItemStatus.NO_SLOT


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def fill(table: SlotTable, key: SequenceKey, length: int, round_id: int = 1) -> None:
    """Cache `length` positions of a sequence."""
    assert table.realign(key, round_id, 0) is ItemStatus.OK
    table[key].num_cached_tokens = length


def test_the_least_recently_used_released_slot_is_evicted_first() -> None:
    table = SlotTable(3)
    for sequence in range(3):
        fill(table, ("a", sequence), 1)
    table.release([("a", 2), ("a", 0), ("a", 1)])
    assert table.find(("a", 2)) is not None
    for sequence in range(3):
        fill(table, ("b", sequence), 1)
    assert [table["b", sequence].index for sequence in range(3)] == [0, 1, 2]
    assert table.find(("a", 2)) is None


def test_a_released_sequence_that_returns_starts_anew() -> None:
    table = SlotTable(1)
    fill(table, ("a", 1), 9)
    table.release([("a", 1)])
    assert table.realign(("a", 1), 2, 5) is ItemStatus.CACHE_MISS
    assert table.realign(("a", 1), 3, 0) is ItemStatus.OK
    assert table.find(("a", 1)) is table["a", 1]
    table.check_integrity()


@pytest.mark.parametrize("base_length", [5, 0])
def test_realigning_truncates_in_place(base_length: int) -> None:
    table = SlotTable(2)
    fill(table, ("a", 1), 9)
    for _ in range(2):  # a repeated round gives the same result
        assert table.realign(("a", 1), 2, base_length) is ItemStatus.OK
        slot = table["a", 1]
        assert (slot.index, slot.num_cached_tokens, slot.round_id, table.in_use) == (0, base_length, 2, 1)
        slot.num_cached_tokens += 4


@pytest.mark.parametrize(
    ("key", "round_id", "base_length", "status"),
    [
        (("a", 1), 4, 3, ItemStatus.STALE_ROUND),
        (("a", 1), 4, 0, ItemStatus.STALE_ROUND),
        (("a", 1), 6, 10, ItemStatus.CACHE_MISS),
        (("b", 1), 6, 3, ItemStatus.CACHE_MISS),
        (("b", 1), 6, 0, ItemStatus.NO_SLOT),
    ],
)
def test_refused_commands_change_nothing(key: SequenceKey, round_id: int, base_length: int, status: ItemStatus) -> None:
    table = SlotTable(1)
    fill(table, ("a", 1), 9, round_id=5)
    assert table.realign(key, round_id, base_length) is status
    assert (table["a", 1].num_cached_tokens, table["a", 1].round_id, table.in_use) == (9, 5, 1)
    with pytest.raises(KeyError):
        table["b", 1]


def test_only_silent_coordinators_expire() -> None:
    table = SlotTable(4)
    for owner in ("silent", "alive"):
        table.renew_lease(owner, 0.0)
        fill(table, (owner, 1), 1)
        fill(table, (owner, 2), 1)
    table.renew_lease("alive", 8.0)
    assert table.expire(10.0, LEASE_SECONDS) == 0
    assert table.expire(10.1, LEASE_SECONDS) == 2
    assert table.in_use == 2
    assert ("alive", 1) in table


def test_orphans_are_evicted_after_released_sequences() -> None:
    table = SlotTable(4)
    for now, owner in enumerate(("old", "new", "alive")):
        table.renew_lease(owner, float(now))
        fill(table, (owner, 1), 1)
    fill(table, ("alive", 2), 1)
    table.release([("alive", 2)])
    table.orphan("new")
    table.orphan("old")
    for sequence, evicted in enumerate([("alive", 2), ("old", 1), ("new", 1)]):
        assert table.find(evicted) is not None
        fill(table, ("next", sequence), 1)
        assert table.find(evicted) is None
    assert table.realign(("next", 3), 1, 0) is ItemStatus.NO_SLOT
    table.check_integrity()


@pytest.mark.parametrize(("renewed", "key"), [(True, ("b", 1)), (False, ("a", 2))])
def test_orphans_seen_again_or_asking_for_themselves_keep_their_sequences(renewed: bool, key: SequenceKey) -> None:
    table = SlotTable(1)
    table.renew_lease("a", 0.0)
    fill(table, ("a", 1), 9)
    table.orphan("a")
    if renewed:
        table.renew_lease("a", 1.0)
    assert table.realign(key, 1, 0) is ItemStatus.NO_SLOT
    assert table["a", 1].num_cached_tokens == 9


def test_orphans_are_evicted_only_as_needed() -> None:
    table = SlotTable(4, Extents(4, max_length=8, columns=16))
    table.renew_lease("a", 0.0)
    for sequence in range(4):
        assert table.realign(("a", sequence), 1, 0, max_length=4) is ItemStatus.OK
    table.orphan("a")
    assert table.realign(("b", 1), 1, 0, max_length=8) is ItemStatus.OK
    assert [("a", sequence) in table for sequence in range(4)] == [False, False, True, True]
    table.check_integrity()


def test_coordinators_without_sequences_are_forgotten() -> None:
    table = SlotTable(2)
    for owner in ("holds", "released"):
        table.renew_lease(owner, 0.0)
        fill(table, (owner, 1), 1)
    table.release([("released", 1)])
    for number in range(1000):
        table.renew_lease(f"hostile {number}", 1.0)
        table.orphan(f"hostile {number}")
        table.orphan(f"unseen {number}")
    assert len(table._last_seen) == len(table._orphaned) + 2 == 2 + IDLE_COORDINATORS
    assert table.expire(LEASE_SECONDS + 0.5, LEASE_SECONDS) == 1
    assert table.find(("released", 1)) is None


def test_integrity_check_detects_a_lost_slot() -> None:
    table = SlotTable(2)
    fill(table, ("a", 1), 1)
    table["a", 1].index = 1
    with pytest.raises(AssertionError, match="lost or held twice"):
        table.check_integrity()
