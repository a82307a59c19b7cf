"""Slots and pages behave like a simple model: every cached position holds the right tokens, whoever shares it."""

from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from specpool.engine.cache.pages import PagePool, PageTables
from specpool.engine.cache.slots import IDLE_COORDINATORS, SequenceKey, SlotTable
from specpool.protocol.rounds import ItemStatus, SequenceItem

SLOTS, PAGES, PAGE_SIZE, MAX_LENGTH = 3, 8, 2, 12
LEASE_SECONDS = 10.0
Content = tuple[bytes | None, tuple[int, ...]]

owners = st.sampled_from(["a", "b", "c"])
keys = st.tuples(owners, st.integers(0, 3))
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def table_of(
    slots: int, columns: int, page_size: int = 1, max_length: int | None = None, window: int | None = None
) -> SlotTable:
    return SlotTable(slots, PageTables(slots, max_length or columns, columns, page_size), window)


def new_sequence(token_ids: Sequence[int], namespace: bytes | None = b"", expected: int = 0) -> SequenceItem:
    return SequenceItem(0, 0, tuple(token_ids), cache_namespace=namespace, expected_prefix_length=expected)


class SlotMachine(RuleBasedStateMachine):
    """Three coordinators compete for slots and pages, and share prefixes."""

    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of(SLOTS, PAGES * PAGE_SIZE, PAGE_SIZE, MAX_LENGTH, self.window)
        self.now = 0.0
        self.held: dict[SequenceKey, tuple[Content, int]] = {}  # cached tokens, round id
        self.starts: dict[SequenceKey, int] = {}  # first position of the last round
        self.memory: dict[int, Content] = {}
        """The tokens up to each column's position, which determine its keys and values."""
        self.last_seen: dict[str, float] = {}
        self.orphaned: set[str] = set()

    def run(self, key: SequenceKey, item: SequenceItem, drafts: int, rejected: int) -> ItemStatus:
        """Serve a round as workers do."""
        (namespace, cached), round_id = self.held.get(key, ((None, ()), 0))
        if item.base_length == 0:
            namespace = item.cache_namespace
        base, token_ids = item.base_length, (*cached[: item.base_length], *item.token_ids)
        status = self.table.realign(key, round_id + 1, item, min(MAX_LENGTH, len(token_ids) + drafts))
        for lost in [held for held in self.held if held not in self.table]:
            assert lost == key or lost[0] in self.orphaned - {key[0]}
            del self.held[lost]
        if status is not ItemStatus.OK:
            if status is ItemStatus.NO_SLOT and key in self.held:
                self.held[key] = (namespace, cached[:base]), round_id
            return status
        assert item.base_length - base == self.table[key].prefix_length
        assert item.token_ids == token_ids[item.base_length :]
        slot, end = self.table[key], len(token_ids)
        slot.token_ids[item.base_length :] = item.token_ids
        for position in range(item.base_length, end):
            self.memory[self.column(slot.index, position)] = namespace, token_ids[: position + 1]
        kept = max(end - rejected, item.base_length)
        self.table.keep(key, kept)
        self.held[key], self.starts[key] = ((namespace, token_ids[:kept]), round_id + 1), item.base_length
        return status

    def column(self, index: int, position: int) -> int:
        number = position // PAGE_SIZE
        (page,) = self.table.tables.pages(index, number, number + 1)
        return page * PAGE_SIZE + position % PAGE_SIZE

    @rule(key=keys, token_ids=tokens, namespace=st.sampled_from([b"x", b"y", None]), drafts=st.integers(0, 3))
    def begin(self, key: SequenceKey, token_ids: tuple[int, ...], namespace: bytes | None, drafts: int) -> None:
        had_room = len(self.held) < SLOTS or key in self.held or bool(self._orphans(key))
        status = self.run(key, new_sequence(token_ids, namespace), drafts, rejected=0)
        assert status in (ItemStatus.OK, ItemStatus.NO_SLOT)
        assert had_room or status is ItemStatus.NO_SLOT

    @rule(key=keys, cut=st.integers(0, 3), token_ids=tokens, drafts=st.integers(0, 3), rejected=st.integers(0, 3))
    def go_on(self, key: SequenceKey, cut: int, token_ids: tuple[int, ...], drafts: int, rejected: int) -> None:
        cached = len(self.held[key][0][1]) if key in self.held else 4
        base = max(1, cached - cut)
        if base + len(token_ids) > MAX_LENGTH:
            return
        status = self.run(key, SequenceItem(0, base, token_ids), drafts, rejected)
        if key not in self.held or base > cached:
            assert status is ItemStatus.CACHE_MISS
        elif cut == 0:
            assert status in (ItemStatus.OK, ItemStatus.NO_SLOT)

    @rule(key=keys, cut=st.integers(1, 3))
    def refuse(self, key: SequenceKey, cut: int) -> None:
        """Items from earlier rounds or with a base beyond the cache change nothing."""
        if key not in self.held:
            return
        (_, cached), round_id = self.held[key]
        item = SequenceItem(0, len(cached) + cut, (0,))
        assert self.table.realign(key, round_id, item, len(cached) + cut + 1) is ItemStatus.CACHE_MISS
        assert self.table.realign(key, round_id - 1, SequenceItem(0, 0, (0,)), 1) is ItemStatus.STALE_ROUND

    @rule(released=st.lists(keys, max_size=4))
    def release(self, released: list[SequenceKey]) -> None:
        assert self.table.release(released) == len(set(released) & set(self.held))
        for key in released:
            self.held.pop(key, None)

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
            del self.held[key]
        for owner in silent:
            del self.last_seen[owner]
        self.orphaned -= silent

    @invariant()
    def nothing_is_lost(self) -> None:
        self.table.check_integrity()
        assert self.table.in_use == len(self.held)

    @invariant()
    def every_position_holds_its_tokens(self) -> None:
        for key, ((namespace, token_ids), round_id) in self.held.items():
            slot = self.table[key]
            assert (slot.num_cached_tokens, slot.round_id) == (len(token_ids), round_id)
            first = 0 if self.window is None else max(0, self.starts[key] + 1 - self.window)
            assert self.table.tables.first(slot.index) == first // PAGE_SIZE * PAGE_SIZE
            for position in range(first, len(token_ids)):
                found = self.memory[self.column(slot.index, position)]
                assert found == (namespace, token_ids[: position + 1])

    def _orphans(self, key: SequenceKey) -> list[SequenceKey]:
        return [held for held in self.held if held[0] in self.orphaned - {key[0]}]


class WindowMachine(SlotMachine):
    """Rows attend to three positions, so leading pages are freed."""

    window = 3


TestSlotMachine, TestWindowMachine = SlotMachine.TestCase, WindowMachine.TestCase
TestSlotMachine.settings = TestWindowMachine.settings = settings(max_examples=100, stateful_step_count=40)


def test_machine_finds_a_page_that_is_freed_while_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    share = PagePool.share

    def share_without_reference(pool: PagePool, digests: Sequence[bytes]) -> list[int]:
        pages = share(pool, digests)
        pool.drop(pages)
        return pages

    monkeypatch.setattr(PagePool, "share", share_without_reference)
    once = settings(max_examples=500, database=None, report_multiple_bugs=False, phases=[Phase.generate])
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(SlotMachine, settings=once)


def test_orphans_are_evicted_only_as_needed() -> None:
    table = table_of(4, columns=16)
    table.renew_lease("a", 0.0)
    for sequence in range(4):
        assert table.realign(("a", sequence), 1, new_sequence([0]), 4) is ItemStatus.OK
    table.orphan("a")
    assert table.realign(("b", 1), 1, new_sequence([0]), 8) is ItemStatus.OK
    assert [("a", sequence) in table for sequence in range(4)] == [False, False, True, True]
    table.check_integrity()


def test_no_orphan_is_evicted_in_vain() -> None:
    """Neither the orphans' own pages nor those that they share with others would suffice."""
    table = table_of(4, columns=16, page_size=4)
    served(table, ("b", 1), range(9))
    table.renew_lease("a", 0.0)
    served(table, ("a", 1), range(9))  # shares two pages
    table.orphan("a")
    assert table.realign(("b", 2), 1, new_sequence([9]), 9) is ItemStatus.NO_SLOT
    assert ("a", 1) in table
    assert table.realign(("b", 2), 1, new_sequence([9]), 4) is ItemStatus.OK
    assert ("a", 1) not in table
    table.check_integrity()


def served(table: SlotTable, key: SequenceKey, token_ids: Sequence[int], expected: int = 0) -> ItemStatus:
    """Serve a sequence's first round with all its tokens."""
    item = new_sequence(token_ids, expected=expected)
    if (status := table.realign(key, 1, item, len(token_ids))) is ItemStatus.OK:
        table[key].token_ids[item.base_length :] = item.token_ids
        table.keep(key, len(token_ids))
    return status


def test_samples_share_the_pages_of_their_prompt() -> None:
    table = table_of(8, columns=80, page_size=4)
    for sample in range(8):
        assert served(table, ("a", sample), range(33)) is ItemStatus.OK
    assert table.tables.free == 80 - 32 - 8 * 4  # each has its own page for the last token
    table.check_integrity()


def test_ended_sequences_leave_their_prefix_until_the_memory_is_needed() -> None:
    table = table_of(2, columns=16, page_size=4)
    table.renew_lease("a", 0.0)
    assert served(table, ("a", 1), range(12)) is ItemStatus.OK
    assert table.release([("a", 1)]) == 1
    assert table.tables.free == 16
    assert served(table, ("a", 2), range(16), expected=12) is ItemStatus.OK
    assert table.release([("a", 2)]) == 1
    assert served(table, ("a", 3), range(100, 112)) is ItemStatus.OK
    evicted = table.take_evicted("a", 2) + table.take_evicted("a", 8)
    assert len(evicted) == 3  # the last pages go first
    assert served(table, ("a", 4), range(5), expected=4) is ItemStatus.NO_SLOT
    assert table.release([("a", 3)]) == 1
    assert served(table, ("a", 4), range(5), expected=4) is ItemStatus.OK
    assert served(table, ("a", 5), range(9), expected=8) is ItemStatus.CACHE_MISS
    table.check_integrity()


def test_coordinators_without_sequences_are_forgotten() -> None:
    table = table_of(2, columns=2)
    for owner in ("holds", "released"):
        table.renew_lease(owner, 0.0)
        assert served(table, (owner, 1), [0]) is ItemStatus.OK
    table.release([("released", 1)])
    for number in range(1000):
        table.renew_lease(f"hostile {number}", 1.0)
        table.orphan(f"hostile {number}")
        table.orphan(f"unseen {number}")
    assert len(table._last_seen) == len(table._orphaned) + 1 == 2 + IDLE_COORDINATORS
    assert table.expire(LEASE_SECONDS + 0.5, LEASE_SECONDS) == 1
    assert table.find(("released", 1)) is None


def test_tokens_of_a_cache_miss_leave_no_digest() -> None:
    """Other tokens may follow the base, and are not cached as those of the missed prefix."""
    table = table_of(3, columns=48, page_size=2)
    served(table, ("a", 1), (1, 1, 2, 2, 3))
    served(table, ("b", 1), (1, 1))
    missed = SequenceItem(0, 2, (2, 2, 9, 9, 9), expected_prefix_length=4)
    assert table.realign(("b", 1), 2, missed, 8) is ItemStatus.CACHE_MISS
    assert table.realign(("b", 1), 3, SequenceItem(0, 2, (7, 7, 7)), 5) is ItemStatus.OK
    table["b", 1].token_ids[2:] = 7, 7, 7
    table.keep(("b", 1), 5)
    table.check_integrity()
    assert served(table, ("c", 1), (1, 1, 7, 7, 5)) is ItemStatus.OK
    assert table["c", 1].prefix_length == 4
