"""Slots against a model of them that is too simple to be wrong."""

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
    """Three coordinators fight for three slots."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(SLOTS)
        self.now = 0.0
        self.held: dict[SequenceKey, tuple[int, int, int]] = {}  # index, cached length, round id
        self.released: dict[SequenceKey, tuple[int, int]] = {}  # index, cached length; least recently used first
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
        """What was released can be copied until its slot is needed."""
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
        """Sequences of other coordinators that are orphaned, those of the least recently seen first."""
        theirs = [held for held in self.held if held[0] in self.orphaned - {key[0]}]
        return sorted(theirs, key=lambda held: self.last_seen[held[0]])

    @rule(key=keys, round_id=st.integers(0, 4), appended=lengths)
    def serve_a_round(self, key: SequenceKey, round_id: int, appended: int) -> None:
        """As the workers do: realign to all that is cached, append, and declare the new length."""
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
    def time_passes(self, seconds: float) -> None:
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
    def nothing_is_lost(self) -> None:
        self.table.check_integrity()
        assert self.table.in_use == len(self.held)

    @invariant()
    def every_slot_is_as_the_model_says(self) -> None:
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
TestSlotMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def cached(table: SlotTable, key: SequenceKey, length: int, round_id: int = 1) -> None:
    """Gives the sequence so many cached positions."""
    assert table.realign(key, round_id, 0) is ItemStatus.OK
    table[key].num_cached_tokens = length


def test_the_lowest_free_slot_is_taken() -> None:
    table = SlotTable(4)
    for sequence in range(4):
        cached(table, ("a", sequence), 1)
    table.release([("a", 2), ("a", 0)])
    table.renew_lease("a", 0.0)
    table.expire(20.0, LEASE_SECONDS)
    cached(table, ("b", 0), 1)
    cached(table, ("b", 1), 1)
    assert [table["b", sequence].index for sequence in range(2)] == [0, 1]


def test_the_slot_that_was_released_and_used_longest_ago_is_given_away_first() -> None:
    table = SlotTable(3)
    for sequence in range(3):
        cached(table, ("a", sequence), 1)
    table.release([("a", 2), ("a", 0), ("a", 1)])
    assert table.find(("a", 2)) is not None
    for sequence in range(3):
        cached(table, ("b", sequence), 1)
    assert [table["b", sequence].index for sequence in range(3)] == [0, 1, 2]
    assert table.find(("a", 2)) is None


def test_a_released_sequence_that_comes_back_begins_anew() -> None:
    table = SlotTable(1)
    cached(table, ("a", 1), 9)
    table.release([("a", 1)])
    assert table.realign(("a", 1), 2, 5) is ItemStatus.CACHE_MISS
    assert table.realign(("a", 1), 3, 0) is ItemStatus.OK
    assert table.find(("a", 1)) is table["a", 1]
    table.check_integrity()


def test_realigning_keeps_the_slot_and_shortens_what_is_cached() -> None:
    table = SlotTable(2)
    cached(table, ("a", 1), 9)
    assert table.realign(("a", 1), 2, 5) is ItemStatus.OK
    assert (table["a", 1].index, table["a", 1].num_cached_tokens, table["a", 1].round_id) == (0, 5, 2)


def test_starting_anew_keeps_the_slot() -> None:
    table = SlotTable(2)
    cached(table, ("a", 1), 9)
    assert table.realign(("a", 1), 2, 0) is ItemStatus.OK
    assert (table["a", 1].index, table["a", 1].num_cached_tokens, table.in_use) == (0, 0, 1)


@pytest.mark.parametrize(
    ("key", "round_id", "base_length", "answer"),
    [
        (("a", 1), 4, 3, ItemStatus.STALE_ROUND),
        (("a", 1), 4, 0, ItemStatus.STALE_ROUND),
        (("a", 1), 6, 10, ItemStatus.CACHE_MISS),
        (("b", 1), 6, 3, ItemStatus.CACHE_MISS),
        (("b", 1), 6, 0, ItemStatus.NO_SLOT),
    ],
)
def test_a_refused_command_changes_nothing(
    key: SequenceKey, round_id: int, base_length: int, answer: ItemStatus
) -> None:
    table = SlotTable(1)
    cached(table, ("a", 1), 9, round_id=5)
    assert table.realign(key, round_id, base_length) is answer
    assert (table["a", 1].num_cached_tokens, table["a", 1].round_id, table.in_use) == (9, 5, 1)
    with pytest.raises(KeyError):
        table["b", 1]


def test_the_same_round_may_come_twice() -> None:
    table = SlotTable(1)
    cached(table, ("a", 1), 9, round_id=5)
    for _ in range(2):
        assert table.realign(("a", 1), 5, 4) is ItemStatus.OK
        table["a", 1].num_cached_tokens = 8
    assert table["a", 1].num_cached_tokens == 8


def test_equal_sequence_ids_of_two_coordinators_are_two_sequences() -> None:
    table = SlotTable(2)
    cached(table, ("a", 1), 3)
    cached(table, ("b", 1), 7)
    assert table.release([("a", 1)]) == 1
    assert table["b", 1].num_cached_tokens == 7


def test_only_the_silent_coordinators_sequences_expire() -> None:
    table = SlotTable(4)
    for owner in ("silent", "alive"):
        table.renew_lease(owner, 0.0)
        cached(table, (owner, 1), 1)
        cached(table, (owner, 2), 1)
    table.renew_lease("alive", 8.0)
    assert table.expire(10.0, LEASE_SECONDS) == 0
    assert table.expire(10.1, LEASE_SECONDS) == 2
    assert table.in_use == 2
    assert table["alive", 1].num_cached_tokens == 1


def test_orphans_yield_after_what_was_released_and_the_least_recently_seen_first() -> None:
    table = SlotTable(4)
    for now, owner in enumerate(("old", "new", "alive")):
        table.renew_lease(owner, float(now))
        cached(table, (owner, 1), 1)
    cached(table, ("alive", 2), 1)
    table.release([("alive", 2)])
    table.orphan("new")
    table.orphan("old")
    for sequence, lost in enumerate([("alive", 2), ("old", 1), ("new", 1)]):
        assert table.find(lost) is not None
        cached(table, ("next", sequence), 1)
        assert table.find(lost) is None
    assert table.realign(("next", 3), 1, 0) is ItemStatus.NO_SLOT
    table.check_integrity()


def test_an_orphan_that_is_seen_again_yields_no_more() -> None:
    table = SlotTable(1)
    table.renew_lease("a", 0.0)
    cached(table, ("a", 1), 9)
    table.orphan("a")
    table.renew_lease("a", 1.0)
    assert table.realign(("b", 1), 1, 0) is ItemStatus.NO_SLOT
    assert table["a", 1].num_cached_tokens == 9


def test_an_orphans_own_sequences_do_not_yield_to_each_other() -> None:
    table = SlotTable(1)
    table.renew_lease("a", 0.0)
    cached(table, ("a", 1), 9)
    table.orphan("a")
    assert table.realign(("a", 2), 1, 0) is ItemStatus.NO_SLOT


def test_orphans_yield_as_much_room_as_is_needed_and_no_more() -> None:
    table = SlotTable(4, Extents(4, longest=8, columns=16))
    table.renew_lease("a", 0.0)
    for sequence in range(4):
        assert table.realign(("a", sequence), 1, 0, max_length=4) is ItemStatus.OK
    table.orphan("a")
    assert table.realign(("b", 1), 1, 0, max_length=8) is ItemStatus.OK
    assert [("a", sequence) in table for sequence in range(4)] == [False, False, True, True]
    table.check_integrity()


def test_coordinators_without_sequences_are_forgotten_before_they_are_many() -> None:
    table = SlotTable(2)
    for owner in ("holds", "released"):
        table.renew_lease(owner, 0.0)
        cached(table, (owner, 1), 1)
    table.release([("released", 1)])
    for number in range(1000):
        table.renew_lease(f"hostile {number}", 1.0)
        table.orphan(f"hostile {number}")
        table.orphan(f"unseen {number}")
    assert len(table._last_seen) == len(table._orphaned) + 2 == 2 + IDLE_COORDINATORS
    assert table.expire(LEASE_SECONDS + 0.5, LEASE_SECONDS) == 1
    assert table.find(("released", 1)) is None


def test_a_released_sequence_is_counted_once() -> None:
    table = SlotTable(2)
    cached(table, ("a", 1), 1)
    assert table.release([("a", 1), ("a", 1), ("a", 2), ("b", 1)]) == 1
    assert table.release([("a", 1)]) == 0


def test_a_lost_slot_does_not_go_unnoticed() -> None:
    table = SlotTable(2)
    cached(table, ("a", 1), 1)
    table["a", 1].index = 1
    with pytest.raises(AssertionError, match="lost or held twice"):
        table.check_integrity()
