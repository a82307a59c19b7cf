"""Every row starts from the state of the tokens before it, whatever is rejected, repeated, lost, shared or evicted."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from specpool.engine.cache.checkpoints import NONE, Checkpoints, Segment
from specpool.engine.cache.pages import PageTables
from specpool.engine.cache.recurrent import tail_rows
from specpool.engine.cache.slots import SequenceKey, SlotTable
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import _chunks
from specpool.protocol.rounds import MAX_DRAFT_TOKENS, MAX_LOOKUP_TOKENS, ItemStatus, SequenceItem

SLOTS, PAGES, PAGE_SIZE, MAX_LENGTH = 2, 18, 4, 48
ROWS, SPACING = 6, 16
State = tuple[int, ...]
"""A recurrent state stands for all tokens before it."""

keys, picks = st.tuples(st.just("a"), st.integers(0, SLOTS)), st.integers(0, SLOTS - 1)
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
counts, limits = st.integers(0, ROWS), st.sampled_from([1, 2, 3, 5, 11, MAX_LENGTH, MAX_LENGTH])
failures = st.sampled_from([False, False, True])
TEXTS = (0,) * MAX_LENGTH, (0,) * 17 + (1,) * MAX_LENGTH


class Device:
    """Checkpoints and tails, read and written as the passes do."""

    def __init__(self, entries: int) -> None:
        self.states: list[State | None] = [None] * entries
        self.tails: list[list[int | None]] = [[None] * ROWS for _ in range(2 * SLOTS)]

    def run(self, segment: Segment, token_ids: Sequence[int]) -> State:
        """Run the tokens of a span. Return the state that its first row starts from."""
        first, size, start, read, read_position, read_tail, write, write_position, write_tail = segment
        assert (first, size, read == write) == (0, len(token_ids), False)
        found = () if read == NONE else self.states[read]
        assert found is not None, "the state was never written"
        rows = [self.tails[read_tail][position - read_position] for position in range(read_position, start)]
        begun = state = found + tuple(row for row in rows if row is not None)
        assert len(begun) == start, "a row of the tail was never written"
        to = read_position if write == NONE else write_position
        assert write == NONE or not rows or write_tail != read_tail
        for position, token in enumerate(token_ids, start):
            if write != NONE and position == write_position:
                self.states[write] = state
            if position >= to:
                self.tails[read_tail if write == NONE else write_tail][position - to] = token
            state += (token,)
        if write != NONE and write_position == start + size:
            self.states[write] = state
        return begun

    def spoil(self, segment: Segment) -> None:
        """Clear what a failed pass may have written."""
        if segment.write != NONE:
            self.states[segment.write] = None
            self.tails[segment.write_tail] = [None] * ROWS
        else:
            first = segment.start - segment.read_position
            self.tails[segment.read_tail][first:] = [None] * (ROWS - first)


class CheckpointMachine(RuleBasedStateMachine):
    """Sequences that share prefixes, on fewer slots."""

    def __init__(self) -> None:
        super().__init__()
        entries = 2 * SLOTS + 1
        self.checkpoints = Checkpoints(SLOTS, entries, PAGE_SIZE, ROWS, SPACING)
        tables = PageTables(SLOTS, MAX_LENGTH, PAGES * PAGE_SIZE, PAGE_SIZE)
        self.table, self.device = SlotTable(SLOTS, tables, checkpoints=self.checkpoints), Device(entries)
        self.held: dict[SequenceKey, State] = {}
        """The tokens that each sequence has cached."""
        self.bases: dict[SequenceKey, set[int]] = {}
        """The bases at which each sequence must be able to continue."""
        self.round_id = 0

    def serve(
        self,
        key: SequenceKey,
        base: int,
        token_ids: State,
        drafts: int = 0,
        accepted: int = 0,
        limit: int = MAX_LENGTH,
        *,
        is_prefill: bool = False,
        fails: bool = False,
    ) -> None:
        """Serve a round as a target worker does, in passes of at most `limit` tokens."""
        drafts, before = min(drafts, MAX_LENGTH - base - len(token_ids)), self.held.get(key, ())
        if drafts < 0:
            return
        item = SequenceItem(0, base, token_ids, cache_namespace=b"" if base == 0 else None)
        self.round_id, is_shared = self.round_id + 1, self._shares_page(key, base)
        status = self.table.realign(key, self.round_id, item, base + len(token_ids) + drafts)
        if status is ItemStatus.CACHE_MISS:
            assert base not in self.bases[key] or is_shared
            self.bases[key] = {each for each in self.bases[key] if each < base}
        elif status is ItemStatus.NO_SLOT and key in self.table:
            self.held[key], self.bases[key] = before[:base], {base}
        elif status is ItemStatus.OK:
            text, first = (*before[:base], *token_ids), item.base_length
            assert item.token_ids == text[first:]
            slot = self.table[key]
            slot.token_ids[first:] = span_ids = (*item.token_ids, *[1 - text[-1]] * drafts)
            span = Span(slot.index, first, span_ids, 0 if is_prefill else drafts + 1, num_tentative=drafts)
            pieces = [piece for (piece,) in _chunks([span], limit)]
            self.held[key], self.bases[key] = text[:first], {first} if len(pieces) == 1 else set()
            if self.run(pieces, fails=fails):
                kept = len(text) + min(drafts, accepted)
                self.table.keep(key, kept)
                self.held[key] = tuple(slot.token_ids[:kept])
                self.bases[key] |= {kept} if drafts <= ROWS else set()
        if key not in self.table:
            self.held.pop(key, None)
            self.bases.pop(key, None)

    def run(self, pieces: Sequence[Span], *, fails: bool) -> bool:
        """Run a span in pieces. Return False if the last one fails."""
        (slot,) = [slot for slot in self.table._slots.values() if slot.index == pieces[0].slot]
        for number, piece in enumerate(pieces, 1):
            segment = self.checkpoints.segment(piece, 0)
            self.checkpoints.check_integrity()
            if fails and number == len(pieces):
                self.device.spoil(segment)
                return False
            begun = self.device.run(segment, piece.token_ids)
            assert begun == tuple(slot.token_ids[: piece.start]), "a row starts from the state of other tokens"
        return True

    @rule(
        key=keys,
        text=st.sampled_from([0, 1]),
        length=st.integers(1, MAX_LENGTH),
        limit=limits,
        fails=failures,
        is_prefill=st.booleans(),
    )
    def begin(self, key: SequenceKey, text: int, length: int, limit: int, *, fails: bool, is_prefill: bool) -> None:
        self.serve(key, 0, TEXTS[text][:length], limit=limit, fails=fails, is_prefill=is_prefill)

    @precondition(lambda self: self.held)
    @rule(pick=picks, text=st.sampled_from([0, 1]), length=st.integers(1, 20), limit=limits)
    def prefill(self, pick: int, text: int, length: int, limit: int) -> None:
        """Continue a prompt. The prefix cache may hold more of it by now."""
        key, base = self._picked(pick)
        self.serve(key, base, TEXTS[text][base : base + length] or (0,), limit=limit, is_prefill=True)

    @precondition(lambda self: self.held)
    @rule(pick=picks, token_ids=tokens, drafts=counts, accepted=counts, limit=limits, fails=failures)
    def go_on(self, pick: int, token_ids: State, drafts: int, accepted: int, limit: int, *, fails: bool) -> None:
        self.serve(*self._picked(pick), token_ids, drafts, accepted, limit, fails=fails)

    @precondition(lambda self: any(self.bases.values()))
    @rule(pick=picks, token_ids=tokens, drafts=counts, accepted=counts)
    def repeat(self, pick: int, token_ids: State, drafts: int, accepted: int) -> None:
        """Repeat the last round, perhaps with other tokens, because its answer was lost."""
        key, _ = self._picked(pick)
        if base := min(self.bases[key], default=0):
            self.serve(key, base, token_ids, drafts, accepted)

    @precondition(lambda self: self.held)
    @rule(pick=picks, cut=st.integers(1, 8), token_ids=tokens, drafts=st.integers(0, 3 * ROWS), accepted=counts)
    def go_back(self, pick: int, cut: int, token_ids: State, drafts: int, accepted: int) -> None:
        """Begin anywhere, with drafts that may be longer than a tail."""
        key, length = self._picked(pick)
        if length > cut:
            self.serve(key, length - cut, token_ids, drafts, accepted)

    @rule(key=keys)
    def release(self, key: SequenceKey) -> None:
        self.table.release([key])
        self.held.pop(key, None)
        self.bases.pop(key, None)

    def _shares_page(self, key: SequenceKey, base: int) -> bool:
        """Whether another sequence reads the page that a round at `base` would overwrite."""
        if not base % PAGE_SIZE:
            return False
        number, tables = base // PAGE_SIZE, self.table.tables
        return any(tables.pool.references(page) > 1 for page in tables.pages(self.table[key].index, number, number + 1))

    def _picked(self, pick: int) -> tuple[SequenceKey, int]:
        """A sequence that has a slot, and its length."""
        key = sorted(self.held)[pick % len(self.held)]
        return key, len(self.held[key])

    @invariant()
    def nothing_is_lost(self) -> None:
        self.table.check_integrity()
        assert {key: self.table[key].num_cached_tokens for key in self.held} == {
            key: len(token_ids) for key, token_ids in self.held.items()
        }


TestCheckpointMachine = CheckpointMachine.TestCase
TestCheckpointMachine.settings = settings(max_examples=100, stateful_step_count=30)


def test_machine_finds_a_tail_read_past_its_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "reach", lambda self, slot, length: length)
    once = settings(max_examples=500, database=None, report_multiple_bugs=False, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CheckpointMachine, settings=once)


def table_of(slots: int, entries: int) -> SlotTable:
    tables = PageTables(slots, 8192, slots * 8192, 32)
    return SlotTable(slots, tables, checkpoints=Checkpoints(slots, entries, 32, 32))


def served(table: SlotTable, number: int, token_ids: Sequence[int], size: int = 256) -> int:
    """Prefill a new sequence in passes of `size` tokens. Return the tokens found in the prefix cache."""
    key, item = ("a", number), SequenceItem(0, 0, tuple(token_ids), cache_namespace=b"")
    status = table.realign(key, 1, item, len(token_ids))
    assert status is ItemStatus.OK, status
    slot, checkpoints = table[key], table.checkpoints
    assert checkpoints is not None
    slot.token_ids[item.base_length :] = item.token_ids
    for (piece,) in _chunks([Span(slot.index, item.base_length, item.token_ids, 1)], size):
        checkpoints.segment(piece, 0)
        table.keep(key, piece.end)
    return slot.prefix_length


@pytest.mark.parametrize(("size", "expected"), [(256, 1024), (1000, 1984), (4096, 0)])
def test_long_prompts_leave_checkpoints_at_intervals(size: int, expected: int) -> None:
    """They are at the first end of a piece after each multiple of 1,024 positions, and at the end of the prompt."""
    table = table_of(4, 12)
    served(table, 0, range(3000), size)
    assert served(table, 1, range(3010), size) == 2976  # the last page border in the prompt
    assert served(table, 2, [*range(2000), *range(9000, 9100)], size) == expected


def test_a_short_last_piece_leaves_the_end_of_the_prompt() -> None:
    table = table_of(2, 6)
    served(table, 0, range(540), size=512)
    assert served(table, 1, range(600)) == 512


def test_a_state_before_all_tokens_is_no_prefix() -> None:
    checkpoints = Checkpoints(1, 3, 32, 32)
    checkpoints.segment(Span(0, 0, [1, 2], 0, num_tentative=2), 0)
    checkpoints.segment(Span(0, 1, [*range(40)], 1, num_tentative=30), 0)
    checkpoints.cache(0, [b"of the first page"])
    assert not checkpoints.pool.has(b"of the first page")


def test_turns_and_samples_share_one_checkpoint() -> None:
    table, prompt = table_of(8, 24), range(100)
    for sample in range(7):
        assert served(table, sample, prompt) == (96 if sample else 0)
    answer = [*prompt, *range(200, 250)]
    table.release([("a", sample) for sample in range(7)])
    assert served(table, 7, answer) == 96
    assert table.cached_prefix(b"", [*answer, 1]) == 128  # the end of the second prompt
    table.check_integrity()


def test_without_its_checkpoint_a_prefix_is_shorter() -> None:
    """Checkpoints are evicted before pages, so the worker offers the longest prefix that still ends at one."""
    table = table_of(2, 4)
    served(table, 0, range(100))
    served(table, 0, range(200))
    assert table.cached_prefix(b"", range(201)) == 192
    table.release([("a", 0)])
    for number in range(4):
        served(table, 1, range(1000 * number + 1000, 1000 * number + 1100))
    assert table.cached_prefix(b"", range(201)) == 0
    item = SequenceItem(0, 0, tuple(range(201)), cache_namespace=b"", expected_prefix_length=192)
    table.release([("a", 1)])
    assert table.realign(("a", 2), 1, item, 201) is ItemStatus.CACHE_MISS
    table.check_integrity()


@pytest.mark.parametrize("page_size", [32, 64])
def test_drafts_ahead_keep_the_positions_where_a_verification_may_end(page_size: int) -> None:
    """The longest lookup is verified, and the longest draft continues it."""
    chance, length, cached = random.Random(0), 100, 99
    checkpoints = Checkpoints(1, 3, page_size, tail_rows(page_size))
    checkpoints.segment(Span(0, 0, [0] * cached, 1), 0)
    for _ in range(300):
        assert checkpoints.reach(0, cached) == cached
        checkpoints.truncate(0, cached)
        unverified, drafted = chance.choice((0, 5, MAX_LOOKUP_TOKENS)), chance.randint(1, MAX_DRAFT_TOKENS)
        new, end = length - cached, length + unverified
        checkpoints.segment(Span(0, cached, [0] * (new + unverified), 1, num_tentative=unverified + (new > 1)), 0)
        for position in range(end, end + drafted):
            checkpoints.segment(Span(0, position, [0], 1, num_tentative=1), 0)
        cached = length + chance.choice((0, unverified // 2, unverified))
        length = cached + chance.choice((1, 1, 4))
        checkpoints.check_integrity()
