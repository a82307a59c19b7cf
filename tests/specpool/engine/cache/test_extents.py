"""Extents keep the contents of every column; slots share them."""

from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specpool.engine.cache.extents import Extents
from specpool.engine.cache.slots import SequenceKey, Slot, SlotTable
from specpool.protocol.rounds import ItemStatus

SLOTS, MAX_LENGTH = 4, 8

keys = st.tuples(st.just("a"), st.integers(0, 4))
failures = st.sampled_from([False, False, False, True])
lengths = st.integers(1, MAX_LENGTH)


class ExtentMachine(RuleBasedStateMachine):
    """Marks the columns of every sequence, to detect moves that lose or mix columns."""

    @initialize(columns=st.integers(MAX_LENGTH, SLOTS * MAX_LENGTH))
    def start(self, columns: int) -> None:
        self.columns = [0] * columns
        self.table = SlotTable(SLOTS, Extents(SLOTS, MAX_LENGTH, columns))
        self.table.extents.move = self.move
        self.marks: dict[SequenceKey, list[int]] = {}
        self.next_mark = 1
        self.fails = False

    def move(self, source: int, destination: int, count: int) -> None:
        if self.fails:
            raise MemoryError
        self.columns[destination : destination + count] = self.columns[source : source + count]

    def fill(self, key: SequenceKey, slot: Slot, length: int) -> None:
        assert slot.capacity == self.table.extents.length(slot.index) == length
        origin, slot.num_cached_tokens = self.table.extents.origins[slot.index], length
        self.marks[key] = list(range(self.next_mark, self.next_mark + length))
        self.columns[origin : origin + length] = self.marks[key]
        self.next_mark += length

    @rule(key=keys, length=lengths, spared=keys, fails=failures)
    def take(self, key: SequenceKey, length: int, spared: SequenceKey, fails: bool) -> None:
        if key in self.table:
            return
        spared_slot, self.fails = self.table.find(spared), fails
        with suppress(MemoryError):
            slot = self.table.take(key, length, spared)
            if slot is not None:
                self.fill(key, slot, length)
        if key != spared:
            assert self.table.find(spared) is spared_slot

    @rule(key=keys, length=lengths, fails=failures)
    def grow(self, key: SequenceKey, length: int, fails: bool) -> None:
        if key not in self.table:
            return
        slot, self.fails = self.table[key], fails
        before, marks = slot.capacity, self.marks[key]
        room = self.table.extents.free + sum(map(len, map(self.marks.get, self.table._released)))  # type: ignore[arg-type]
        status = None
        with suppress(MemoryError):
            status = self.table.realign(key, 0, before, length)
        if status is ItemStatus.OK and length > before:
            self.fill(key, slot, length)
            origin = self.table.extents.origins[slot.index]
            self.columns[origin : origin + before] = self.marks[key][:before] = marks
        elif status is ItemStatus.NO_SLOT:
            assert length - before > room
        assert slot.capacity == (max(before, length) if status is ItemStatus.OK else before)

    @rule(key=keys, source=keys, length=lengths, fails=failures)
    def inherit(self, key: SequenceKey, source: SequenceKey, length: int, fails: bool) -> None:
        released = self.table.find(source)
        if key in self.table or released is None or source in self.table:
            return
        before, marks, self.fails = released.capacity, self.marks[source], fails
        slot = None
        with suppress(MemoryError):
            slot = self.table.inherit(key, source, length)
        if slot is None:
            assert length > before
            assert self.table.find(source) is released
            return
        origin, kept = self.table.extents.origins[slot.index], min(before, length)
        assert slot.num_cached_tokens == kept
        assert self.columns[origin : origin + kept] == marks[:kept]
        assert key == source or self.table.find(source) is None
        self.fill(key, slot, length)

    @rule(released=st.lists(keys, min_size=1, max_size=3), drops=failures)
    def release(self, released: list[SequenceKey], drops: bool) -> None:
        self.table.release(released)
        if drops and len(released) == 3:
            self.table.drop_released()

    @invariant()
    def contents_are_kept(self) -> None:
        self.table.check_integrity()
        extents = self.table.extents
        cached = {key: slot for key in self.marks if (slot := self.table.find(key)) is not None}
        self.marks = {key: self.marks[key] for key in cached}
        assert extents.free == len(self.columns) - sum(map(len, self.marks.values()))
        for key, slot in cached.items():
            origin = extents.origins[slot.index]
            assert self.columns[origin : origin + len(self.marks[key])] == self.marks[key]
        for slot in set(range(SLOTS)) - {slot.index for slot in cached.values()}:
            assert 0 <= extents.origins[slot] <= len(self.columns) - MAX_LENGTH


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize(("length", "columns"), [(None, 64), (0, 16), (1, 16), (16, 16), (17, 32), (64, 64), (90, 64)])
def test_capacity_is_rounded_up_and_limited(length: int | None, columns: int) -> None:
    assert Extents(2, max_length=64, multiple=16).capacity_for(length) == columns


def test_an_extent_grows_in_place_if_it_can_and_moves_others_only_if_it_must() -> None:
    extents, moved = Extents(4, max_length=16, columns=16), []
    extents.move = lambda *move: moved.append(move)
    for slot in range(3):
        extents.reserve(slot, 4)
    extents.resize(2, 8)
    assert (extents.origins[2], moved) == (8, [])
    extents.release(1)
    extents.resize(0, 8)
    assert (extents.origins[0], moved) == (0, [])
    extents.resize(2, 4)
    extents.resize(0, 12)
    assert (extents.origins[0], extents.origins[2], moved) == (0, 12, [(8, 12, 4)])
    extents.check_integrity()


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
