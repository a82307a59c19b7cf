"""The pool against a model of itself: arbitrary arrivals, rounds, endings and aborts, in any order."""

import math
from collections.abc import Iterable
from itertools import count
from typing import Any
from unittest import mock

import pytest
from fair_rule import FairRule
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.scheduling.capacity import DuplicateRequestError, KVCapacity, PoolFullError, QueueLimits
from coordinator.scheduling.grouping import GroupingLimits, Ragged
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.sequence import FinishReason, GenerationRequest, Prefix, Sequence

# Few, so that ids are used again, as clients do: also while an aborted namesake is still in its round.
REQUEST_IDS = st.sampled_from("abcdefgh")
CLIENTS = st.sampled_from("xyz")


# Prompts that begin alike or do not, in lengths around the blocks in which that is noticed.
PROMPTS = st.tuples(st.integers(0, 1), st.sampled_from([1, 15, 17, 40])).map(lambda prompt: (prompt[0],) * prompt[1])


def make_sequence(
    sequence_id: int,
    request_id: str | None = None,
    max_tokens: int = 3,
    prompt: tuple[int, ...] = (1,),
    **fields: Any,
) -> Sequence:
    request = GenerationRequest(request_id or str(sequence_id), prompt, max_tokens, frozenset(), 4, **fields)
    return Sequence(sequence_id, request)


class PoolMachine(RuleBasedStateMachine):
    """`waiting` and `inside` are what the pool should hold, `left` what still has a slot; `group` plays a round."""

    @initialize(
        max_num_seqs=st.integers(1, 4),
        queue_size=st.integers(0, 4),
        positions=st.sampled_from([0, 1, 20, 40, 90]),
        multiple=st.sampled_from([0, 1, 16]),
    )
    def start(self, max_num_seqs: int, queue_size: int, positions: int, multiple: int) -> None:
        self.pool = Pool(max_num_seqs, QueueLimits(queue_size), preempts=False)
        self.pool.reservations.capacity = KVCapacity(positions, multiple)
        self.kept: dict[int, int] = {}
        self.ids = count(1)
        self.rule = FairRule()
        self.inside: list[Sequence] = []
        self.left: set[int] = set()
        self.group: list[Sequence] = []

    @property
    def waiting(self) -> list[Sequence]:
        return self.rule.waiting

    def in_flight(self) -> list[Sequence]:
        return self.waiting + [sequence for sequence in self.inside if sequence.finish is None]

    def room(self) -> int:
        return self.pool.max_num_seqs - len(self.inside) - len(self.left)

    def next_to_enter(self, waiting: list[Sequence]) -> list[Sequence]:
        for sequence_id in set(self.kept) - {sequence.sequence_id for sequence in self.inside} - self.left:
            del self.kept[sequence_id]
        entering: list[Sequence] = []
        taken = sum(self.kept.values())
        for sequence in waiting[: self.room()]:
            taken += self.pool.reservations.capacity.needed_by(sequence)
            if (self.kept or entering) and 0 < self.pool.reservations.capacity.positions < taken:
                break
            entering.append(sequence)
        return entering

    def most_waiting(self, client: str, n: int, entering: int) -> int:
        size, window = self.pool.limits.samples, self.pool.max_num_seqs
        has_others = any(sequence.request.client == client for sequence in self.waiting)
        return size if has_others or n - entering > size else size + min(size, window)

    @rule(
        request_id=REQUEST_IDS,
        prompt=PROMPTS,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        client=CLIENTS,
        priority=st.integers(-1, 1),
    )
    def submit(self, request_id: str, prompt: tuple[int, ...], n: int, client: str, priority: int) -> None:
        fields: dict[str, Any] = {"client": client, "priority": priority}
        samples = [make_sequence(next(self.ids), request_id, prompt=prompt, **fields) for _ in range(n)]
        entering = len(self.next_to_enter([*self.waiting, *samples]))
        for other in samples[1:]:
            other.target_prefix = Prefix(samples[0], len(prompt) - 1)
        if any(other.request.key == (client, request_id) for other in self.in_flight()):
            with pytest.raises(DuplicateRequestError):
                self.pool.submit(samples)
        elif len(self.waiting) + n - entering > self.most_waiting(client, n, entering):
            with pytest.raises(PoolFullError):
                self.pool.submit(samples)
        else:
            self.pool.submit(samples)
            self.rule.add(samples)

    @rule()
    def admit(self) -> None:
        expected: list[Sequence] = []
        while self.waiting and self.next_to_enter([self.rule.next]):
            sequence = self.rule.next
            self.kept[sequence.sequence_id] = self.pool.reservations.capacity.needed_by(sequence)
            self.inside.append(sequence)
            self.rule.enter(sequence)
            expected.append(sequence)
        assert self.pool.admit() == expected

    @precondition(lambda self: not self.group)
    @rule(limit=st.integers(1, 4))
    def begin_round(self, limit: int) -> None:
        self.group = Ragged(GroupingLimits(limit)).choose(self.pool.ready, self.pool.rounds).sequences
        self.pool.begin_round(self.group)

    @precondition(lambda self: self.group)
    @rule(gained=st.integers(0, 3))
    def end_round(self, gained: int) -> None:
        for sequence in self.group:
            if sequence.finish is None:
                sequence.num_cached_tokens = len(sequence.token_ids) - 1
                sequence.target_prefix = None
                sequence.commit([0] * gained)
        self.pool.end_round(self.group)
        for sequence in self.group:
            if sequence.finish is not None:
                self.inside.remove(sequence)
                self.left.add(sequence.sequence_id)
        self.group = []

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.in_flight()))
        self.pool.abort(sequence)
        assert sequence.finish is not None
        assert sequence.finish.reason is FinishReason.ABORT
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence not in self.group:
            self.inside.remove(sequence)
            self.left.add(sequence.sequence_id)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def pause_or_resume(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.inside))
        if sequence.paused:
            self.pool.resume(sequence)
        else:
            self.pool.pause(sequence)

    @rule()
    def release(self) -> None:
        leaving = self.pool.leaving
        assert leaving == self.left
        self.pool.released(leaving)
        self.rule.running = [sequence for sequence in self.rule.running if sequence.sequence_id not in leaving]
        self.left.clear()

    @invariant()
    def holds_what_it_should(self) -> None:
        self.pool.check_integrity()
        assert self.pool.queued == len(self.waiting)
        assert self.pool.running == len(self.in_flight()) - len(self.waiting)
        assert not any(sequence.paused for sequence in self.pool.ready)
        idle = {sequence for sequence in self.inside if sequence not in self.group}
        assert idle >= set(self.pool.ready)
        assert set(self.pool.members) == idle
        for sequence in self.in_flight():
            assert sequence in self.pool.find(*sequence.request.key)

    def teardown(self) -> None:
        """Whatever happened before, rounds of one sequence at a time finish all."""
        if not hasattr(self, "pool"):
            return
        everybody = self.in_flight()
        if self.group:
            self.end_round(1)
        for sequence in everybody:
            self.pool.resume(sequence)
        for _ in range(5 * len(everybody) + 1):
            self.release()
            self.admit()
            self.begin_round(1)
            if self.group:
                self.end_round(1)
            self.holds_what_it_should()
        assert all(sequence.finish is not None for sequence in everybody)
        assert (self.pool.running, self.pool.queued) == (0, 0)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def filled(max_num_seqs: int, number: int, queue_size: int = 100) -> tuple[Pool, list[Sequence]]:
    pool = Pool(max_num_seqs, QueueLimits(queue_size))
    sequences = [make_sequence(i, max_tokens=1000) for i in range(number)]
    for sequence in sequences:
        pool.submit([sequence])
    return pool, sequences


def test_admission_is_first_come_first_served() -> None:
    pool, sequences = filled(max_num_seqs=3, number=7)
    assert pool.admit() == sequences[:3]
    assert pool.admit() == []
    pool.abort(sequences[1])
    pool.abort(sequences[4])
    pool.released(pool.leaving)
    assert pool.admit() == [sequences[3]]
    assert list(pool.ready) == [sequences[0], sequences[2], sequences[3]]


@pytest.mark.parametrize(("window", "limit"), [(1, 1), (5, 2), (7, 3), (4, 8)])
def test_nobody_waits_longer_than_one_turn_of_the_others(window: int, limit: int) -> None:
    pool, sequences = filled(window, number=window)
    pool.admit()
    last_played = dict.fromkeys(sequences, 0)
    for turn in range(1, 40):
        group = Ragged(GroupingLimits(limit)).choose(pool.ready, pool.rounds).sequences
        pool.begin_round(group)
        pool.end_round(group)
        last_played.update(dict.fromkeys(group, turn))
        assert turn - min(last_played.values()) <= math.ceil(window / limit)


def test_a_leaving_sequence_counts_until_its_slot_is_free() -> None:
    pool, sequences = filled(max_num_seqs=1, number=2)
    pool.admit()
    pool.abort(sequences[0])
    assert pool.admit() == []
    assert (pool.running, pool.queued, pool.leaving) == (0, 1, {0})
    pool.released({0})
    assert pool.admit() == [sequences[1]]


def test_an_abort_in_a_round_leaves_at_its_end() -> None:
    pool, (sequence,) = filled(max_num_seqs=1, number=1)
    pool.admit()
    pool.begin_round([sequence])
    pool.abort(sequence)
    assert pool.leaving == set()
    pool.end_round([sequence])
    assert pool.leaving == {0}
    assert list(pool.ready) == []


def test_a_request_id_can_be_used_again_while_its_aborted_namesake_is_in_a_round() -> None:
    pool, (old,) = filled(max_num_seqs=2, number=1)
    pool.admit()
    pool.begin_round([old])
    pool.abort(old)
    new = make_sequence(1, old.request.request_id)
    pool.submit([new])
    pool.end_round([old])
    assert pool.find(*new.request.key) == [new]
    assert (pool.running, pool.queued) == (0, 1)


def test_a_duplicate_request_id_is_refused_and_changes_nothing() -> None:
    pool, (sequence,) = filled(max_num_seqs=1, number=1)
    with pytest.raises(DuplicateRequestError):
        pool.submit([make_sequence(7, sequence.request.request_id)])
    assert pool.find(*sequence.request.key) == [sequence]
    assert pool.queued == 1


def test_without_a_queue_the_window_still_serves() -> None:
    pool, sequences = filled(max_num_seqs=2, number=2, queue_size=0)
    with pytest.raises(PoolFullError):
        pool.submit([make_sequence(9)])
    assert pool.admit() == sequences
    with pytest.raises(PoolFullError):
        pool.submit([make_sequence(9)])


def test_aborting_twice_or_after_the_end_does_nothing() -> None:
    pool, (sequence,) = filled(max_num_seqs=1, number=1)
    pool.admit()
    pool.begin_round([sequence])
    sequence.commit([0] * 1000)
    pool.abort(sequence)
    pool.end_round([sequence])
    pool.abort(sequence)
    assert sequence.finish is not None
    assert sequence.finish.reason is FinishReason.LENGTH
    assert pool.leaving == {0}


def sharing(pool: Pool, ids: Iterable[int], prompt: tuple[int, ...] = (5,) * 40) -> list[Sequence]:
    """Sequences of the same prompt, submitted."""
    sequences = [make_sequence(i, max_tokens=2, prompt=prompt) for i in ids]
    for sequence in sequences:
        pool.submit([sequence])
    return sequences


def prefill(pool: Pool, sequence: Sequence, length: int) -> None:
    pool.begin_round([sequence])
    sequence.num_cached_tokens = length
    pool.end_round([sequence])


def test_who_begins_as_another_does_waits_until_the_shared_part_was_worked_off() -> None:
    pool = Pool(4, QueueLimits(9))
    first, second, longer = [*sharing(pool, [1, 2]), *sharing(pool, [3], (5,) * 20 + (6,) * 20)]
    pool.admit()
    assert list(pool.ready) == [first]
    prefill(pool, first, 16)
    pool.admit()
    assert list(pool.ready) == [first, longer]
    prefill(pool, first, 39)
    pool.admit()
    assert list(pool.ready) == [longer, first, second]
    assert (second.target_base_length, longer.target_base_length) == (32, 16)


def test_nobody_waits_for_one_that_was_aborted() -> None:
    pool = Pool(4, QueueLimits(9))
    first, second = sharing(pool, [1, 2])
    pool.admit()
    pool.abort(first)
    pool.admit()
    assert list(pool.ready) == [second]
    assert second.target_base_length == 0


def test_without_prefix_reuse_nobody_waits_and_nothing_is_copied() -> None:
    pool = Pool(4, QueueLimits(9), prefix_caching=False)
    sequences = sharing(pool, [1, 2])
    pool.admit()
    assert list(pool.ready) == sequences
    assert [sequence.target_prefix for sequence in sequences] == [None, None]


def test_finished_sequences_are_prefixes_while_there_are_slots_for_them() -> None:
    pool = Pool(1, QueueLimits(9), slots=2)
    sources = []
    for i, prompt in enumerate([(5,) * 40, (6,) * 40, (7,) * 40]):
        (sequence,) = sharing(pool, [i], prompt)
        pool.admit()
        prefill(pool, sequence, 39)
        pool.begin_round([sequence])
        sequence.commit([1, 1])
        pool.end_round([sequence])
        pool.released({i})
        sources.append(sequence)
    again = [*sharing(pool, [8], (7,) * 40 + (1, 1, 2)), *sharing(pool, [9], (5,) * 40)]
    pool.admit()
    assert again[0].target_prefix == Prefix(sources[2], 32)
    assert again[0].target_base_length == 32
    pool.abort(again[0])
    pool.released({8})
    pool.admit()
    assert again[1].target_prefix is None


def test_finished_sequences_keep_no_others_alive() -> None:
    """A prefix names its source, which had a source of its own: whole histories would never be freed."""
    pool = Pool(1, QueueLimits(9), slots=9)
    for i in range(3):
        (sequence,) = sharing(pool, [i])
        pool.admit()
        prefill(pool, sequence, 39)
        pool.abort(sequence)
        pool.released({i})
        assert sequence.target_prefix is sequence.draft_prefix is None


# --- Fair between clients: the rule itself is tested in test_fair_queue.py


def admit_all(pool: Pool, rounds: int) -> list[Sequence]:
    """The order in which sequences enter where each leaves as soon as another one needs its place."""
    entered: list[Sequence] = []
    for _ in range(rounds):
        entered += pool.admit()
        pool.abort(next(iter(pool.members)))
        pool.released(pool.leaving)
    return entered


def test_two_hundred_requests_of_one_client_delay_one_of_another_by_one_place() -> None:
    pool = Pool(4, QueueLimits(300))
    for i in range(200):
        pool.submit([make_sequence(i, max_tokens=1000, client="many")])
    pool.admit()
    pool.submit([make_sequence(999, client="one")])
    assert [s.sequence_id for s in admit_all(pool, 3)][:2] == [999, 4]


def test_a_request_of_many_samples_lets_others_of_its_client_pass() -> None:
    pool = Pool(8, QueueLimits(100))
    pool.submit([make_sequence(i, "many") for i in range(64)])
    pool.admit()
    pool.submit([make_sequence(100)])
    pool.submit([make_sequence(101)])
    assert [s.sequence_id for s in admit_all(pool, 5)][:4] == [100, 101, 8, 9]


def test_priority_orders_the_requests_of_one_client_and_not_those_of_others() -> None:
    pool = Pool(1, QueueLimits(9))
    for i, (client, priority) in enumerate([("a", 5), ("a", 0), ("b", 9), ("a", -1), ("b", 8)]):
        pool.submit([make_sequence(i, client=client, priority=priority)])
    assert [s.sequence_id for s in admit_all(pool, 5)] == [3, 4, 1, 2, 0]


def test_a_client_keeps_no_other_out_of_a_full_queue() -> None:
    pool = Pool(2, QueueLimits(5))
    for i in range(7):
        pool.submit([make_sequence(i, client="greedy")])
    pool.admit()
    with pytest.raises(PoolFullError, match="5 samples wait"):
        pool.submit([make_sequence(7, client="greedy")])
    pool.submit([make_sequence(8, client="modest")])
    with pytest.raises(PoolFullError):
        pool.submit([make_sequence(9, client="modest")])
    pool.submit([make_sequence(10, client="third")])
    with pytest.raises(PoolFullError):
        pool.submit([make_sequence(11, client="fourth")])  # what is kept free for others has an end too
    pool.check_integrity()


def test_samples_of_a_client_are_limited_where_the_settings_say_so() -> None:
    pool = Pool(2, QueueLimits(9, per_client=3))
    for i in range(3):
        pool.submit([make_sequence(i, client="a")])
    pool.admit()
    with pytest.raises(PoolFullError, match="3 samples of this client are in flight, of at most 3") as caught:
        pool.submit([make_sequence(7, client="a"), make_sequence(8, client="a", request_id="7")])
    assert caught.value.places == 2
    pool.submit([make_sequence(9, client="b")])
    pool.abort(next(iter(pool.ready)))
    pool.released(pool.leaving)
    pool.submit([make_sequence(7, client="a")])


def test_the_prompts_that_wait_are_limited_by_their_tokens() -> None:
    pool = Pool(1, QueueLimits(99, tokens=100))
    pool.submit([make_sequence(0, prompt=(1,) * 500, client="a")])  # enters at once
    pool.admit()
    pool.submit([make_sequence(1, prompt=(1,) * 90, client="a")])
    with pytest.raises(PoolFullError, match="90 prompt tokens wait, of at most 100"):
        pool.submit([make_sequence(2, prompt=(1,) * 11, client="a")])
    pool.submit([make_sequence(3, prompt=(1,) * 10, client="a")])
    pool.submit([make_sequence(4, prompt=(1,) * 100, client="b")])
    with pytest.raises(PoolFullError):
        pool.submit([make_sequence(5, prompt=(1,) * 1, client="c")])
    for i in (1, 3, 4):
        pool.abort(next(s for client in "ab" for s in pool.find(client, str(i))))
    pool.submit([make_sequence(6, prompt=(1,) * 500, client="a")])  # alone any request may wait
    pool.check_integrity()


def test_request_ids_are_the_clients_own() -> None:
    pool = Pool(2, QueueLimits(9))
    mine, others = make_sequence(1, "id", client="me"), make_sequence(2, "id", client="other")
    pool.submit([mine])
    pool.submit([others])
    assert pool.find("me", "id") == [mine]
    pool.abort(mine)
    assert (pool.find("me", "id"), pool.find("other", "id")) == ([], [others])


# --- Readers that lag behind


def test_a_paused_sequence_is_in_no_round_and_keeps_its_place() -> None:
    pool, (one, other, waits) = filled(max_num_seqs=2, number=3)
    pool.admit()
    pool.pause(one)
    assert (list(pool.ready), pool.running, pool.schedulable, pool.capacity) == ([other], 2, 1, 0)
    assert one in pool.members
    pool.begin_round([other])
    pool.pause(other)
    pool.end_round([other])
    assert (list(pool.ready), pool.is_empty) == ([], False)
    pool.check_integrity()
    pool.resume(other)
    pool.resume(one)
    assert list(pool.ready) == [other, one]
    pool.pause(one)
    pool.abort(one)
    pool.released(pool.leaving)
    assert pool.admit() == [waits]


def paused_and_waiting(waiting: int) -> tuple[Pool, list[Sequence], list[Sequence]]:
    """A pool of two paused sequences and of some that wait, after an admission."""
    pool, (one, other, *others) = filled(max_num_seqs=2, number=2 + waiting)
    pool.admit(2)
    for sequence in (one, other):
        sequence.num_cached_tokens = sequence.num_draft_cached_tokens = 1
        pool.pause(sequence)
    assert pool.admit() == []
    pool.check_integrity()
    return pool, [one, other], others


def test_paused_sequences_give_their_places_to_those_that_wait_and_queue_again() -> None:
    pool, (one, other), (waits,) = paused_and_waiting(1)
    assert (pool.leaving, list(pool.members), one.num_cached_tokens) == ({one.sequence_id}, [other], 0)
    pool.released(pool.leaving)
    assert (pool.admit(), pool.is_empty) == ([waits], False)
    pool.resume(one)
    assert pool.queued == 1
    assert pool.admit() == []
    assert pool.leaving == {other.sequence_id}, "it is paused, and one waits that is read"
    pool.released(pool.leaving)
    assert pool.admit() == [one]
    assert set(pool.ready) == {waits, one}
    pool.check_integrity()


def test_paused_sequences_keep_their_places_while_nobody_waits() -> None:
    pool, (one, other), _ = paused_and_waiting(0)
    assert (pool.leaving, list(pool.members), one.num_cached_tokens) == (set(), [one, other], 1)


@pytest.mark.parametrize("read_again", [False, True])
def test_one_that_is_read_again_before_its_place_is_free_queues_afterwards(read_again: bool) -> None:
    pool, (one, other), (waits,) = paused_and_waiting(1)
    pool.resume(one)
    assert pool.queued == 1
    if not read_again:
        pool.pause(one)
    pool.released(pool.leaving)
    assert pool.queued == 1 + read_again
    pool.check_integrity()
    assert pool.admit() == [waits]
    assert other.paused


def test_one_that_was_set_aside_can_be_aborted_at_any_time() -> None:
    for released_first in (False, True):
        pool, (one, other), (waits,) = paused_and_waiting(1)
        if released_first:
            pool.released(pool.leaving)
        pool.abort(one)
        pool.resume(one)
        pool.released(pool.leaving)
        assert pool.admit() == [waits]
        for sequence in (other, waits):
            pool.abort(sequence)
        pool.released(pool.leaving)
        assert (pool.is_empty, pool.find(*one.request.key)) == (True, [])
        pool.check_integrity()


def test_nobody_waits_for_a_prefix_of_one_that_is_paused() -> None:
    """After the target lost its caches the source has yet to prefill again, but it will not until its reader reads."""
    pool = Pool(4, QueueLimits(9))
    first, second = sharing(pool, [1, 2])
    pool.admit()
    assert list(pool.ready) == [first]
    pool.pause(first)
    pool.admit()
    assert list(pool.ready) == [second]


# --- Ten thousand waiting


def test_admitting_and_aborting_look_at_few_of_ten_thousand() -> None:
    pool = Pool(8, QueueLimits(20_000))
    ranks = mock.Mock(side_effect=lambda owner: (owner.priority, owner.running, owner.since))
    with mock.patch("coordinator.scheduling.fair_queue._Request.rank", property(ranks)):
        sequences = [make_sequence(i, client=str(i % 100)) for i in range(10_000)]
        for sequence in sequences:
            pool.submit([sequence])
        assert ranks.call_count <= 2 * len(sequences)
        ranks.reset_mock()
        for sequence in sequences[::2]:
            pool.abort(sequence)
        assert len(admit_all(pool, 1000)) == 1007
        assert ranks.call_count <= 2 * 6007
    pool.check_integrity()


def test_submitting_to_a_large_window_looks_at_each_sequence_a_few_times() -> None:
    pool, needed_by = Pool(2000, QueueLimits(2000)), KVCapacity.needed_by
    with mock.patch.object(KVCapacity, "needed_by", autospec=True, side_effect=needed_by) as looked:
        for i in range(2000):
            pool.submit([make_sequence(i)])
        assert len(pool.admit()) == 2000
    assert looked.call_count <= 3 * 2000


# --- Places that are given to others


def crowded(max_num_seqs: int, **settings: Any) -> tuple[Pool, list[Sequence]]:
    """A pool whose window is full of one client's sequences, each further than the one before."""
    pool = Pool(max_num_seqs, QueueLimits(100), **settings)
    sequences = [make_sequence(i, max_tokens=1000, client="anne") for i in range(max_num_seqs)]
    for sequence in sequences:
        pool.submit([sequence])
    pool.admit()
    for sequence in sequences:
        sequence.num_cached_tokens = 1 + sequence.sequence_id
    return pool, sequences


def test_a_client_without_a_place_gets_that_of_the_sequence_with_least_to_lose() -> None:
    pool, anne = crowded(3)
    bob = make_sequence(9, client="bob")
    pool.submit([bob])
    assert pool.admit() == []
    assert (pool.leaving, anne[0].num_cached_tokens, anne[0].is_preempted) == ({0}, 0, True)
    assert pool.admit() == []
    assert pool.leaving == {0}, "one place is on its way already"
    pool.released({0})
    assert (pool.admit(), pool.queued) == ([bob], 1)
    assert pool.admit() == []
    assert pool.leaving == set(), "the sequence that was set aside does not take places from its own client"
    pool.check_integrity()
    pool.abort(bob)
    pool.released(pool.leaving)
    assert (pool.admit(), anne[0].is_preempted) == ([anne[0]], False)


def test_a_client_with_one_place_keeps_it() -> None:
    pool, anne = crowded(1)
    pool.submit([make_sequence(9, client="bob")])
    assert pool.admit() == []
    assert (pool.leaving, list(pool.ready)) == (set(), anne)


def test_a_fixed_batch_gives_no_places_away() -> None:
    pool, anne = crowded(3, preempts=False)
    pool.submit([make_sequence(9, client="bob")])
    assert pool.admit() == []
    assert (pool.leaving, list(pool.ready)) == (set(), anne)


def test_samples_of_one_request_give_places_to_other_requests_and_come_back_as_its_samples() -> None:
    pool = Pool(3, QueueLimits(100))
    samples = [make_sequence(i, request_id="many", client="anne") for i in range(5)]
    for sample in samples:
        sample.first_sample_id = 0
    pool.submit(samples)
    assert pool.admit() == samples[:3]
    single = make_sequence(9, client="anne")
    pool.submit([single])
    assert pool.admit() == []
    (aside,) = pool.leaving
    pool.released({aside})
    assert pool.admit() == [single]
    for _ in range(3):
        assert pool.admit() == []
        assert pool.leaving == set(), "its own samples are no other request"
    pool.check_integrity()
    pool.abort(single)
    pool.released(pool.leaving)
    assert len(pool.admit()) == 1


def test_sequences_that_were_set_aside_count_for_their_client_and_keep_no_newcomer_out() -> None:
    pool = Pool(2, QueueLimits(4, per_client=6))
    anne = [make_sequence(i, client="anne") for i in range(6)]
    for sequence in anne[:2]:
        pool.submit([sequence])
    pool.admit()
    for sequence in anne[2:]:
        pool.pause(anne[sequence.sequence_id - 2])
        pool.submit([sequence])
        pool.admit()
        pool.released(pool.leaving)
        pool.admit()
    assert (len(pool._preempted), pool.queued) == (4, 0)
    with pytest.raises(PoolFullError, match="of this client"):
        pool.submit([make_sequence(7, client="anne")])
    for sequence in anne:
        pool.resume(sequence)
    assert pool.queued == 4
    for i in range(10, 14):
        pool.submit([make_sequence(i, client=str(i))])
    pool.check_integrity()


def test_sequences_in_a_round_stay() -> None:
    pool, anne = crowded(2)
    pool.begin_round(anne)
    pool.submit([make_sequence(9, client="bob")])
    pool.admit()
    assert pool.leaving == set()
    pool.end_round(anne)
    pool.admit()
    assert len(pool.leaving) == 1


@given(st.data())
def test_whoever_gives_places_to_whom_all_finish(data: st.DataObject) -> None:
    pool = Pool(data.draw(st.integers(1, 4)), QueueLimits(1000))
    ids, left, ended = count(), 12, 0
    flying: list[Sequence] = []
    while left or flying:
        if left and (not flying or data.draw(st.booleans())):
            left -= 1
            client, first = data.draw(st.sampled_from("ab")), next(ids)
            samples = [make_sequence(first, request_id=str(first), max_tokens=2, client=client)]
            samples += [
                make_sequence(next(ids), request_id=str(first), max_tokens=2, client=client)
                for _ in range(data.draw(st.sampled_from([0, 0, 3])))
            ]
            for sample in samples:
                sample.first_sample_id = first
            pool.submit(samples)
            flying += samples
        if data.draw(st.booleans()) and flying:
            (pool.resume if flying[0].paused else pool.pause)(flying[0])
        if not left:
            for sequence in flying:
                pool.resume(sequence)
        pool.admit()
        group = list(pool.ready)[: data.draw(st.integers(1, 4))]
        pool.begin_round(group)
        for sequence in group:
            sequence.commit([7])
            sequence.num_cached_tokens = len(sequence.token_ids) - 1
        pool.end_round(group)
        pool.released(pool.leaving)
        pool.check_integrity()
        ended += sum(sequence.finish is not None for sequence in flying)
        flying = [sequence for sequence in flying if sequence.finish is None]
    assert (pool.is_empty, pool.queued, pool.running) == (True, 0, 0)
