"""Extents against a cache that remembers whose every column is."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specpool.engine.cache.extents import Extents
from specpool.engine.cache.slots import SequenceKey, SlotTable
from specpool.protocol.rounds import ItemStatus

SLOTS, LONGEST = 5, 8


class ExtentMachine(RuleBasedStateMachine):
    """Every extent's columns are marked; a move that loses or mixes any is seen."""

    @initialize(columns=st.integers(LONGEST, SLOTS * LONGEST))
    def start(self, columns: int) -> None:
        self.cache = [0] * columns
        self.extents = Extents(SLOTS, LONGEST, columns)
        self.extents.move = self.move
        self.marks: dict[int, list[int]] = {}
        self.next_mark = 1

    def move(self, source: int, destination: int, count: int) -> None:
        self.cache[destination : destination + count] = self.cache[source : source + count]

    def mark(self, slot: int) -> None:
        origin, length = self.extents.origins[slot], self.extents.length(slot)
        self.marks[slot] = list(range(self.next_mark, self.next_mark + length))
        self.cache[origin : origin + length] = self.marks[slot]
        self.next_mark += length

    @rule(slot=st.integers(0, SLOTS - 1), length=st.integers(1, LONGEST))
    def reserve(self, slot: int, length: int) -> None:
        if slot not in self.marks and self.extents.free >= length:
            self.extents.reserve(slot, length)
            assert self.extents.length(slot) == length
            self.mark(slot)

    @rule(slot=st.integers(0, SLOTS - 1), length=st.integers(1, LONGEST))
    def resize(self, slot: int, length: int) -> None:
        if slot not in self.marks:
            return
        before = self.extents.length(slot)
        kept = self.marks[slot][: min(before, length)]
        if self.extents.resize(slot, length):
            assert self.extents.length(slot) == length
            origin = self.extents.origins[slot]
            assert self.cache[origin : origin + len(kept)] == kept
            self.mark(slot)
        else:
            assert length > before

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        if self.marks.pop(slot, None):
            self.extents.release(slot)
            assert self.extents.length(slot) == 0
            assert 0 <= self.extents.origins[slot] <= len(self.cache) - LONGEST

    @invariant()
    def nothing_is_lost(self) -> None:
        self.extents.check_integrity()
        assert self.extents.free == len(self.cache) - sum(map(len, self.marks.values()))
        for slot, marks in self.marks.items():
            origin = self.extents.origins[slot]
            assert self.cache[origin : origin + len(marks)] == marks


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("length", "room"), [(None, 64), (0, 16), (1, 16), (16, 16), (17, 32), (64, 64), (90, 64)])
def test_room_is_a_multiple_and_never_more_than_the_longest(length: int | None, room: int) -> None:
    assert Extents(2, longest=64, multiple=16).capacity_for(length) == room


def test_gaps_are_closed_only_when_one_is_needed() -> None:
    extents, moved = Extents(4, longest=8, columns=16), []
    extents.move = lambda *move: moved.append(move)
    for slot in range(4):
        extents.reserve(slot, 4)
    extents.release(0)
    extents.release(2)
    extents.reserve(0, 4)
    assert (extents.origins[0], moved) == (0, [])
    extents.release(0)
    extents.reserve(2, 8)
    assert moved == [(4, 0, 4), (12, 4, 4)]
    assert [extents.origins[slot] for slot in (1, 3, 2)] == [0, 4, 8]


def test_an_overlap_does_not_go_unnoticed() -> None:
    extents = Extents(2, longest=8)
    extents.reserve(0, 8)
    extents.reserve(1, 8)
    extents.origins[1] = 7
    with pytest.raises(AssertionError, match="overlap"):
        extents.check_integrity()
    extents.origins[1] = 9
    with pytest.raises(AssertionError, match="leaves the cache"):
        extents.check_integrity()


# --- Slots that share a cache


def filled(table: SlotTable, key: SequenceKey, length: int) -> None:
    assert table.realign(key, 1, 0, length) is ItemStatus.OK
    table[key].num_cached_tokens = length


def test_what_was_released_gives_way_as_far_as_it_must() -> None:
    table = SlotTable(8, Extents(8, longest=16, columns=16))
    for sequence in range(4):
        filled(table, ("a", sequence), 4)
    assert table.realign(("b", 0), 1, 0, 1) is ItemStatus.NO_SLOT
    table.release([("a", 1), ("a", 2), ("a", 3)])
    assert table.realign(("b", 0), 1, 0, 13) is ItemStatus.NO_SLOT, "more than there will ever be room for"
    assert all(table.find(("a", sequence)) for sequence in range(4)), "a refused command changes nothing"
    assert table.realign(("b", 0), 1, 0, 6) is ItemStatus.OK
    assert table["b", 0].capacity == 6
    assert [bool(table.find(("a", sequence))) for sequence in range(4)] == [True, False, False, True]
    table.check_integrity()


def test_a_source_is_spared_and_may_be_inherited() -> None:
    table = SlotTable(2, Extents(2, longest=16, columns=16))
    filled(table, ("a", 1), 8)
    filled(table, ("a", 2), 8)
    table.release([("a", 1)])
    assert table.take(("a", 3), 8, spared=("a", 1)) is None
    slot = table.inherit(("a", 3), ("a", 1), 6)
    assert slot is not None
    assert (slot.index, slot.capacity, slot.num_cached_tokens) == (0, 6, 6)
    assert table.find(("a", 1)) is None
    table.check_integrity()


def test_what_is_inherited_moves_where_it_has_room_or_stays() -> None:
    table = SlotTable(2, Extents(2, longest=16, columns=24))
    moved: list[tuple[int, int, int]] = []
    table.extents.move = lambda *move: moved.append(move)
    filled(table, ("a", 1), 4)
    filled(table, ("a", 2), 8)
    table.release([("a", 1)])
    assert table.inherit(("a", 3), ("a", 1), 13) is None
    assert table.find(("a", 1)) is not None
    slot = table.inherit(("a", 3), ("a", 1), 12)
    assert slot is not None
    assert slot.capacity == 12
    assert moved == [(0, 12, 4)]
    table.check_integrity()


def test_a_sequence_that_was_released_and_inherits_is_not_held_twice() -> None:
    table = SlotTable(3, Extents(3, longest=16, columns=16))
    filled(table, ("a", 1), 8)
    filled(table, ("a", 2), 4)
    filled(table, ("a", 3), 4)
    table.release([("a", 1), ("a", 2)])
    slot = table.inherit(("a", 2), ("a", 1), 8)
    assert slot is not None
    assert table.find(("a", 2)) is slot
    table.check_integrity()
    table.release([("a", 2), ("a", 3)])
    table.drop_released()
    assert table.extents.free == 16
    table.check_integrity()


def test_a_move_that_fails_loses_nothing() -> None:
    """Such as for want of memory."""

    def fail(source: int, destination: int, count: int) -> None:
        raise MemoryError

    table = SlotTable(4, Extents(4, longest=16, columns=16))
    for sequence in range(4):
        filled(table, ("a", sequence), 4)
    table.release([("a", 0), ("a", 2)])
    table.extents.move = fail
    with pytest.raises(MemoryError):
        table.take(("b", 0), 8)
    table.check_integrity()
    filled(table, ("b", 1), 4)
    table.release([("b", 1)])
    table.extents.release(table["a", 1].index)
    table.extents.reserve(table["a", 1].index, 2)
    table.release([("a", 1)])
    with pytest.raises(MemoryError):
        table.inherit(("b", 2), ("a", 1), 8)
    table.check_integrity()
    table.release([("a", 3)])
    table.drop_released()
    assert table.extents.free == 16
