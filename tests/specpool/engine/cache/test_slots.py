"""Slots behave like a simple model of them."""

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
TestSlotMachine.settings = settings(max_examples=100, stateful_step_count=40)


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
        assert table.realign((owner, 1), 1, 0) is ItemStatus.OK
    table.release([("released", 1)])
    for number in range(1000):
        table.renew_lease(f"hostile {number}", 1.0)
        table.orphan(f"hostile {number}")
        table.orphan(f"unseen {number}")
    assert len(table._last_seen) == len(table._orphaned) + 2 == 2 + IDLE_COORDINATORS
    assert table.expire(LEASE_SECONDS + 0.5, LEASE_SECONDS) == 1
    assert table.find(("released", 1)) is None
