"""Extents keep the contents of every column; slots share them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specpool.engine.cache.extents import Extents
from specpool.engine.cache.slots import SequenceKey, SlotTable
from specpool.protocol.rounds import ItemStatus

SLOTS, MAX_LENGTH = 5, 8


class ExtentMachine(RuleBasedStateMachine):
    """Marks every column of an extent, to detect moves that lose or mix columns."""

    @initialize(columns=st.integers(MAX_LENGTH, SLOTS * MAX_LENGTH))
    def start(self, columns: int) -> None:
        self.columns = [0] * columns
        self.extents = Extents(SLOTS, MAX_LENGTH, columns)
        self.extents.move = self.move
        self.marks: dict[int, list[int]] = {}
        self.next_mark = 1

    def move(self, source: int, destination: int, count: int) -> None:
        self.columns[destination : destination + count] = self.columns[source : source + count]

    def mark(self, slot: int) -> None:
        origin, length = self.extents.origins[slot], self.extents.length(slot)
        self.marks[slot] = list(range(self.next_mark, self.next_mark + length))
        self.columns[origin : origin + length] = self.marks[slot]
        self.next_mark += length

    @rule(slot=st.integers(0, SLOTS - 1), length=st.integers(1, MAX_LENGTH))
    def reserve(self, slot: int, length: int) -> None:
        if slot not in self.marks and self.extents.free >= length:
            self.extents.reserve(slot, length)
            assert self.extents.length(slot) == length
            self.mark(slot)

    @rule(slot=st.integers(0, SLOTS - 1), length=st.integers(1, MAX_LENGTH))
    def resize(self, slot: int, length: int) -> None:
        if slot not in self.marks:
            return
        before = self.extents.length(slot)
        kept = self.marks[slot][: min(before, length)]
        if self.extents.resize(slot, length):
            assert self.extents.length(slot) == length
            origin = self.extents.origins[slot]
            assert self.columns[origin : origin + len(kept)] == kept
            self.mark(slot)
        else:
            assert length > before

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        if self.marks.pop(slot, None):
            self.extents.release(slot)
            assert self.extents.length(slot) == 0
            assert 0 <= self.extents.origins[slot] <= len(self.columns) - MAX_LENGTH

    @invariant()
    def contents_are_kept(self) -> None:
        self.extents.check_integrity()
        assert self.extents.free == len(self.columns) - sum(map(len, self.marks.values()))
        for slot, marks in self.marks.items():
            origin = self.extents.origins[slot]
            assert self.columns[origin : origin + len(marks)] == marks


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("length", "columns"), [(None, 64), (0, 16), (1, 16), (16, 16), (17, 32), (64, 64), (90, 64)])
def test_capacity_is_rounded_up_and_limited(length: int | None, columns: int) -> None:
    assert Extents(2, max_length=64, multiple=16).capacity_for(length) == columns


def test_gaps_are_closed_only_when_needed() -> None:
    extents, moved = Extents(4, max_length=8, columns=16), []
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


def test_integrity_check_detects_overlaps() -> None:
    extents = Extents(2, max_length=8)
    extents.reserve(0, 8)
    extents.reserve(1, 8)
    for origin, message in ((7, "overlap"), (9, "leaves the cache")):
        extents.origins[1] = origin
        with pytest.raises(AssertionError, match=message):
            extents.check_integrity()


# --- Slots that share a cache


def fill(table: SlotTable, key: SequenceKey, length: int) -> None:
    assert table.realign(key, 1, 0, length) is ItemStatus.OK
    table[key].num_cached_tokens = length


def test_released_sequences_are_evicted_only_as_needed() -> None:
    table = SlotTable(8, Extents(8, max_length=16, columns=16))
    for sequence in range(4):
        fill(table, ("a", sequence), 4)
    assert table.realign(("b", 0), 1, 0, 1) is ItemStatus.NO_SLOT
    table.release([("a", 1), ("a", 2), ("a", 3)])
    assert table.realign(("b", 0), 1, 0, 13) is ItemStatus.NO_SLOT, "sequence 0 holds 4 of 16 columns"
    assert all(table.find(("a", sequence)) for sequence in range(4)), "a refused command evicts nothing"
    assert table.realign(("b", 0), 1, 0, 6) is ItemStatus.OK
    assert table["b", 0].capacity == 6
    assert [bool(table.find(("a", sequence))) for sequence in range(4)] == [True, False, False, True]
    table.check_integrity()


def test_a_spared_source_can_be_inherited() -> None:
    table = SlotTable(2, Extents(2, max_length=16, columns=16))
    fill(table, ("a", 1), 8)
    fill(table, ("a", 2), 8)
    table.release([("a", 1)])
    assert table.take(("a", 3), 8, spared=("a", 1)) is None
    slot = table.inherit(("a", 3), ("a", 1), 6)
    assert slot is not None
    assert (slot.index, slot.capacity, slot.num_cached_tokens) == (0, 6, 6)
    assert table.find(("a", 1)) is None
    table.check_integrity()


def test_an_inherited_extent_moves_to_a_large_enough_gap() -> None:
    table = SlotTable(2, Extents(2, max_length=16, columns=24))
    moved: list[tuple[int, int, int]] = []
    table.extents.move = lambda *move: moved.append(move)
    fill(table, ("a", 1), 4)
    fill(table, ("a", 2), 8)
    table.release([("a", 1)])
    assert table.inherit(("a", 3), ("a", 1), 13) is None
    assert table.find(("a", 1)) is not None
    slot = table.inherit(("a", 3), ("a", 1), 12)
    assert slot is not None
    assert (slot.capacity, moved) == (12, [(0, 12, 4)])
    table.check_integrity()


def test_an_heir_that_was_released_itself_is_held_once() -> None:
    table = SlotTable(3, Extents(3, max_length=16, columns=16))
    for sequence, length in ((1, 8), (2, 4), (3, 4)):
        fill(table, ("a", sequence), length)
    table.release([("a", 1), ("a", 2)])
    slot = table.inherit(("a", 2), ("a", 1), 8)
    assert slot is not None
    assert table.find(("a", 2)) is slot
    table.check_integrity()
    table.release([("a", 2), ("a", 3)])
    table.drop_released()
    assert table.extents.free == 16
    table.check_integrity()


def test_a_failed_move_loses_nothing() -> None:
    """For example, when memory runs out."""

    def fail(source: int, destination: int, count: int) -> None:
        raise MemoryError

    table = SlotTable(4, Extents(4, max_length=16, columns=16))
    for sequence in range(4):
        fill(table, ("a", sequence), 4)
    table.release([("a", 0), ("a", 2)])
    table.extents.move = fail
    with pytest.raises(MemoryError):
        table.take(("b", 0), 8)
    table.check_integrity()
    fill(table, ("b", 1), 4)
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
