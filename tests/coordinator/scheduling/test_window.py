"""The window matches a simple model, with arrivals, rounds, finishes and aborts in any order."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

import pytest
from admitting_window import AdmittingWindow
from fair_rule import FairRule
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.scheduling.admission import MAX_OVERTAKEN
from coordinator.scheduling.capacity import (
    DuplicateRequestError,
    KVCapacity,
    QueueLimitError,
    QueueLimits,
    protected_tokens,
)
from coordinator.scheduling.grouping import GroupingLimits, Ragged
from coordinator.scheduling.request_queue import RequestQueue
from coordinator.scheduling.sequence import FinishReason, GenerationRequest, Sequence
from specpool.engine.cache.pages import PageTables
from specpool.engine.cache.slots import SlotTable
from specpool.protocol.rounds import ItemStatus, VerifyItem

# Few ids, so that they are reused, even while an aborted request with the same id is in a round.
REQUEST_IDS = st.sampled_from("abcdefgh")
CLIENTS = st.sampled_from("xyz")
# Prompts with shared prefixes, in lengths around the page size.
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


class WindowMachine(RuleBasedStateMachine):
    """The model: `waiting` sequences, those `inside` the window, `left` ones with a slot, and the round's `group`."""

    @initialize(
        max_num_seqs=st.integers(1, 4),
        queue_size=st.integers(0, 4),
        positions=st.sampled_from([0, 1, 20, 40, 90]),
        page_size=st.sampled_from([0, 1, 16]),
    )
    def start(self, max_num_seqs: int, queue_size: int, positions: int, page_size: int) -> None:
        self.window = AdmittingWindow(max_num_seqs, QueueLimits(queue_size), preempts=False)
        self.window.fit(max_num_seqs, KVCapacity(positions // max(1, page_size), page_size))
        self.seen: dict[int, Sequence] = {}
        self.overtaken: Counter[Sequence] = Counter()
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
        return self.window.max_num_seqs - len(self.inside) - len(self.left)

    def next_to_enter(self, waiting: list[Sequence]) -> list[Sequence]:
        holders = [*self.inside, *(self.seen[sequence_id] for sequence_id in self.left)]
        entering: list[Sequence] = []
        held = taken = self.num_pages(holders)
        for sequence in waiting[: self.room()]:
            taken += self.num_pages([*holders, sequence]) - held
            if (holders or entering) and 0 < self.window.pages.capacity.pages < taken:
                break
            entering.append(sequence)
        return entering

    def num_pages(self, sequences: list[Sequence]) -> int:
        """Return the pages that all sequences hold. Equal full pages of a client's prompts count once."""
        capacity, shared, num_own = self.window.pages.capacity, set[tuple[str, tuple[int, ...]]](), 0
        for sequence in sequences:
            prompt = sequence.request.prompt_ids
            ends = range(capacity.page_size, len(prompt) + 1, capacity.page_size) if capacity.page_size else ()
            shared |= {(sequence.request.client, prompt[:end]) for end in ends}
            num_own += -(-sequence.max_length // max(1, capacity.page_size)) - len(ends)
        return len(shared) + num_own

    def next_that_fits(self) -> Sequence | None:
        """The next sequence, or one that needs less of the cache and has not overtaken the next one too often."""
        if not self.waiting or not self.room():
            return None
        first = self.rule.next
        for sequence in self.rule.in_turn():
            if self.next_to_enter([sequence]):
                self.overtaken[first] += sequence is not first
                return None if self.overtaken[first] > MAX_OVERTAKEN else sequence
        return None

    def max_waiting(self, client: str, n: int, entering: int) -> int:
        size, clients = self.window.queue.limits.samples, [sequence.request.client for sequence in self.waiting]
        reserve, own = min(size, self.window.max_num_seqs), clients.count(client)
        fair = reserve // len(set(clients)) if own else size
        return size + reserve if own + n - entering <= fair else size

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
        if any(other.request.key == (client, request_id) for other in self.in_flight()):
            with pytest.raises(DuplicateRequestError):
                self.window.queue.submit(samples)
        elif len(self.waiting) + n - entering > self.max_waiting(client, n, entering):
            with pytest.raises(QueueLimitError):
                self.window.queue.submit(samples)
        else:
            self.window.queue.submit(samples)
            self.rule.add(samples)

    @rule()
    def admit(self) -> None:
        expected: list[Sequence] = []
        while (sequence := self.next_that_fits()) is not None:
            self.seen[sequence.sequence_id] = sequence
            self.inside.append(sequence)
            self.rule.enter(sequence)
            expected.append(sequence)
        assert self.window.admit() == expected

    @precondition(lambda self: not self.group)
    @rule(limit=st.integers(1, 4))
    def begin_round(self, limit: int) -> None:
        self.group = Ragged(GroupingLimits(limit)).choose(self.window.ready, self.window.rounds).sequences
        self.window.begin_round(self.group)

    @precondition(lambda self: self.group)
    @rule(gained=st.integers(0, 3))
    def end_round(self, gained: int) -> None:
        for sequence in self.group:
            if sequence.finish is None:
                sequence.target.commit(len(sequence.token_ids) - 1)
                sequence.commit([0] * gained)
        self.window.end_round(self.group)
        for sequence in self.group:
            if sequence.finish is not None:
                self.inside.remove(sequence)
                self.left.add(sequence.sequence_id)
        self.group = []

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.in_flight()))
        self.window.queue.abort(sequence)
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
            self.window.queue.resume(sequence)
        else:
            self.window.queue.pause(sequence)

    @rule()
    def release(self) -> None:
        leaving = self.window.leaving
        assert leaving == self.left
        self.window.released(leaving)
        self.rule.running = [sequence for sequence in self.rule.running if sequence.sequence_id not in leaving]
        self.left.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.window.check_integrity()
        assert self.window.queued == len(self.waiting)
        assert self.window.running == len(self.in_flight()) - len(self.waiting)
        assert not any(sequence.paused for sequence in self.window.ready)
        idle = {sequence for sequence in self.inside if sequence not in self.group}
        assert idle >= set(self.window.ready)
        assert set(self.window.members) == idle
        for sequence in self.in_flight():
            assert sequence in self.window.queue.find(*sequence.request.key)

    def teardown(self) -> None:
        """Rounds of one sequence at a time finish everything."""
        if not hasattr(self, "window"):
            return
        unfinished = self.in_flight()
        if self.group:
            self.end_round(1)
        for sequence in unfinished:
            self.window.queue.resume(sequence)
        for _ in range(5 * len(unfinished) + 1):
            self.release()
            self.admit()
            self.begin_round(1)
            if self.group:
                self.end_round(1)
            self.agrees_with_the_model()
        assert all(sequence.finish is not None for sequence in unfinished)
        assert (self.window.running, self.window.queued) == (0, 0)


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=80, stateful_step_count=40)


def filled(max_num_seqs: int, number: int, queue_size: int = 100) -> tuple[AdmittingWindow, list[Sequence]]:
    window = AdmittingWindow(max_num_seqs, QueueLimits(queue_size))
    return window, submit(window, *(make_sequence(i, max_tokens=1000) for i in range(number)))


def submit(window: AdmittingWindow, *sequences: Sequence) -> list[Sequence]:
    """Submit each sequence as a request of its own."""
    for sequence in sequences:
        window.queue.submit([sequence])
    return list(sequences)


def release(window: AdmittingWindow) -> None:
    window.released(window.leaving)


# --- Prefixes


def paged(max_num_seqs: int, pages: int = 0, **options: Any) -> AdmittingWindow:
    """A window of a target with pages of 16 positions."""
    window = AdmittingWindow(max_num_seqs, QueueLimits(9), **options)
    window.fit(max_num_seqs, KVCapacity(pages, 16))
    return window


def sharing(window: AdmittingWindow, ids: Iterable[int], prompt: tuple[int, ...] = (5,) * 40) -> list[Sequence]:
    """Submit sequences with the same prompt."""
    return submit(window, *(make_sequence(i, max_tokens=2, prompt=prompt) for i in ids))


def prefill(window: AdmittingWindow, sequence: Sequence, length: int) -> None:
    window.begin_round([sequence])
    sequence.target.commit(length)
    window.end_round([sequence])


def test_sequences_wait_for_shared_pages_to_be_prefilled() -> None:
    window = paged(4)
    first, second, longer = [*sharing(window, [1, 2]), *sharing(window, [3], (5,) * 20 + (6,) * 20)]
    window.admit()
    assert list(window.ready) == [first]
    prefill(window, first, 16)
    window.admit()
    assert list(window.ready) == [first, longer]
    prefill(window, first, 39)
    window.admit()
    assert list(window.ready) == [longer, first, second]
    assert (second.target.predicted, longer.target.predicted) == (32, 16)
    assert (second.target.base_length, second.target.start) == (0, 32)


@pytest.mark.parametrize("interrupt", [RequestQueue.abort, RequestQueue.pause])
def test_no_sequence_waits_for_an_aborted_or_paused_prefill(
    interrupt: Callable[[RequestQueue, Sequence], None],
) -> None:
    window = paged(4)
    first, second, third = sharing(window, [1, 2, 3])
    window.admit()
    assert list(window.ready) == [first]
    interrupt(window.queue, first)
    window.admit()
    assert list(window.ready) == [second]
    assert second.target.start == 0
    assert list(window.parked.values()) == [third], "it waits for the second"


def test_a_resumed_sequence_uses_the_pages_that_another_has_prefilled_meanwhile() -> None:
    window = paged(4)
    first, second = sharing(window, [1, 2])
    window.admit()
    prefill(window, first, 16)
    window.queue.pause(first)
    window.admit()
    prefill(window, second, 39)
    window.queue.resume(first)
    assert (first.target.base_length, first.target.start) == (16, 32)


def test_prefix_caching_can_be_disabled() -> None:
    window = paged(4)
    request = GenerationRequest("r", (5,) * 40, 2, frozenset(), 4)
    sequences = [Sequence(i, replace(request, request_id=str(i)), prefix_caching=False) for i in range(2)]
    submit(window, *sequences)
    window.admit()
    assert list(window.ready) == sequences
    assert [sequence.cache_namespace for sequence in sequences] == [None, None]


def test_pages_of_finished_sequences_are_found_until_the_target_evicts_them() -> None:
    window = paged(1)
    prompts = [(5,) * 40, (6,) * 40]
    for i, prompt in enumerate(prompts):
        (sequence,) = sharing(window, [i], prompt)
        window.admit()
        prefill(window, sequence, 39)
        window.begin_round([sequence])
        sequence.target.commit(41)
        sequence.commit([1, 1])
        window.end_round([sequence])
        release(window)
    window.forget_pages(sequence.page_digests(16, 32)[1:])

    def predicted(sequence_id: int, prompt: tuple[int, ...]) -> int:
        (sequence,) = sharing(window, [sequence_id], prompt)
        window.admit()
        window.queue.abort(sequence)
        release(window)
        return sequence.target.predicted

    assert [predicted(8, (*prompts[0], 1, 1, 2)), predicted(9, (*prompts[1], 1, 1, 2))] == [32, 16]


def test_a_wrong_prediction_is_not_repeated() -> None:
    window = paged(1)
    (first,) = sharing(window, [1])
    window.admit()
    prefill(window, first, 40)
    window.queue.abort(first)
    release(window)
    (second,) = sharing(window, [2])
    window.admit()
    assert second.target.predicted == 32
    window.begin_round([second])
    second.target.mispredict()
    window.end_round([second])
    assert (list(window.ready), second.target.start) == ([second], 0)
    prefill(window, second, 16)
    assert window.prefix_length(make_sequence(3, prompt=(5,) * 40)) == 32, "it is prefilling the rest"


def test_shared_pages_are_held_once() -> None:
    window = paged(4, pages=12)
    one, other = sharing(window, [1, 2], (5,) * 65)  # four full pages, and one of their own
    window.admit()
    assert (window.pages.used, window.pages[one.sequence_id], window.pages[other.sequence_id]) == (6, 1, 1)
    assert window.kv_usage == 0.5
    stranger = make_sequence(3, prompt=(5,) * 65, client="z")
    assert (window.pages.needed_by(stranger), window.pages.needed_by(make_sequence(4, prompt=(5,) * 65))) == (5, 1)
    submit(window, stranger)
    window.admit()
    assert window.pages.by_client((), Counter()) == {"": 6, "z": 5}
    window.queue.abort(one)
    assert window.pages.by_client(window.leaving_ids, Counter()) == {"": 5, "z": 5}
    release(window)
    assert (window.pages.used, window.pages[other.sequence_id]) == (10, 5)
    window.check_integrity()


@pytest.mark.parametrize("length", [62, 63, 64, 65, 66])
def test_pages_are_counted_as_targets_hold_them(length: int) -> None:
    """A page that the prompt fills to its last token is not shared, because that token runs."""
    prompt = (5,) * length
    window, target = paged(4, pages=40), SlotTable(4, PageTables(4, 640, 640, 16))
    sequences = sharing(window, [1, 2, 3], prompt)
    window.admit()
    for sequence in sequences:
        key, item = ("c", sequence.sequence_id), VerifyItem(0, 0, prompt, cache_namespace=b"")
        held_until = min(sequence.next_length + protected_tokens(length), sequence.max_length)
        assert target.realign(key, 1, item, held_until) is ItemStatus.OK
        target[key].token_ids[item.base_length :] = item.token_ids
        target.keep(key, length)
    assert window.pages.used == 40 - target.tables.free // 16


def test_a_target_with_other_pages_is_counted_anew() -> None:
    window = paged(2, pages=20)
    one, other = sharing(window, [1, 2])
    window.admit()
    window.fit(2, KVCapacity(100, 4))
    assert (window.pages.used, window.pages[one.sequence_id]) == (13, 2)
    window.check_integrity()
    window.admit()
    assert (list(window.ready), list(window.parked.values())) == ([one], [other])


def test_caches_of_a_replaced_target_are_forgotten() -> None:
    window = paged(4)
    first, second = sharing(window, [1, 2])
    window.admit()
    prefill(window, first, 40)
    window.admit()
    window.forget_target_caches()
    assert [sequence.target.start for sequence in (first, second)] == [0, 0]
    (third,) = sharing(window, [3])
    window.admit()
    assert list(window.parked.values()) == [third], "the first one prefills its pages again"
    window.check_integrity()


# --- Fairness between clients; test_fair_queue.py tests the rule itself


def admit_all(window: AdmittingWindow, rounds: int) -> list[int]:
    """The order in which sequences enter, if each leaves as soon as another needs its place."""
    entered: list[int] = []
    for _ in range(rounds):
        entered += [sequence.sequence_id for sequence in window.admit()]
        window.queue.abort(next(iter(window.members)))
        release(window)
    return entered


def test_no_client_locks_others_out_of_the_queue() -> None:
    window = AdmittingWindow(2, QueueLimits(5))
    submit(window, *(make_sequence(i, client="greedy") for i in range(7)))
    window.admit()
    with pytest.raises(QueueLimitError, match="5 samples wait"):
        window.queue.submit([make_sequence(7, client="greedy")])
    submit(window, make_sequence(8, client="modest"))
    with pytest.raises(QueueLimitError):
        window.queue.submit([make_sequence(9, client="modest")])
    submit(window, make_sequence(10, client="third"))
    with pytest.raises(QueueLimitError):
        window.queue.submit([make_sequence(11, client="fourth")])  # the reserve is limited too
    window.check_integrity()


def test_a_client_may_have_several_samples_in_a_queue_that_another_fills() -> None:
    window = AdmittingWindow(8, QueueLimits(20))
    submit(window, *(make_sequence(i, client="greedy") for i in range(28)))
    window.admit()
    submit(window, *(make_sequence(i, client="modest") for i in range(30, 34)))
    with pytest.raises(QueueLimitError):
        window.queue.submit([make_sequence(34, client="modest")])
    submit(window, make_sequence(35, client="third"))
    window.check_integrity()


def test_queued_prompt_tokens_are_limited() -> None:
    window = AdmittingWindow(1, QueueLimits(99, tokens=100))
    submit(window, make_sequence(0, prompt=(1,) * 500, client="a"))  # enters at once
    window.admit()
    submit(window, make_sequence(1, prompt=(1,) * 90, client="a"))
    with pytest.raises(QueueLimitError, match="90 tokens wait, of at most 100"):
        window.queue.submit([make_sequence(2, prompt=(1,) * 11, client="a")])
    submit(window, make_sequence(3, prompt=(1,) * 10, client="a"), make_sequence(4, prompt=(1,) * 100, client="b"))
    with pytest.raises(QueueLimitError):
        window.queue.submit([make_sequence(5, client="c")])
    for client, i in (("a", 1), ("a", 3), ("b", 4)):
        window.queue.abort(*window.queue.find(client, str(i)))
    submit(window, make_sequence(6, prompt=(1,) * 500, client="a"))  # a single request may always wait
    window.check_integrity()


# --- Paused sequences


def test_a_paused_sequence_joins_no_round_and_keeps_its_place() -> None:
    window, (one, other, waiting) = filled(max_num_seqs=2, number=3)
    window.admit()
    window.queue.pause(one)
    assert (list(window.ready), window.running, window.schedulable, window.capacity) == ([other], 2, 1, 0)
    assert one in window.members
    window.begin_round([other])
    window.queue.pause(other)
    window.end_round([other])
    assert (list(window.ready), window.is_empty) == ([], False)
    window.check_integrity()
    window.queue.resume(other)
    window.queue.resume(one)
    assert list(window.ready) == [other, one]
    window.queue.pause(one)
    window.queue.abort(one)
    release(window)
    assert window.admit() == [waiting]


def paused_and_waiting(number: int) -> tuple[AdmittingWindow, list[Sequence], list[Sequence]]:
    """A window with two paused sequences and `number` waiting ones, after an admission."""
    window, (one, other, *waiting) = filled(max_num_seqs=2, number=2 + number)
    window.admit(2)
    for sequence in (one, other):
        sequence.target.commit(1)
        sequence.draft.commit(1)
        window.queue.pause(sequence)
    assert window.admit() == []
    window.check_integrity()
    return window, [one, other], waiting


def test_paused_sequences_are_preempted_only_for_waiting_ones() -> None:
    window, (one, other), _ = paused_and_waiting(0)
    assert (window.leaving, list(window.members), one.target.num_cached_tokens) == (set(), [one, other], 1)
    window, (one, other), (waiting,) = paused_and_waiting(1)
    assert (window.leaving, list(window.members), one.target.num_cached_tokens) == ({one.sequence_id}, [other], 0)
    release(window)
    assert (window.admit(), window.is_empty) == ([waiting], False)
    window.queue.resume(one)
    assert window.queued == 1
    assert window.admit() == []
    assert window.leaving == {other.sequence_id}
    release(window)
    assert window.admit() == [one]
    assert set(window.ready) == {waiting, one}
    window.check_integrity()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_preempted_sequence_queues_once_its_slot_is_released(resumed: bool) -> None:
    window, (one, other), (waiting,) = paused_and_waiting(1)
    window.queue.resume(one)
    assert window.queued == 1
    if not resumed:
        window.queue.pause(one)
    release(window)
    assert window.queued == 1 + resumed
    window.check_integrity()
    assert window.admit() == [waiting]
    assert other.paused


@pytest.mark.parametrize("released", [False, True])
def test_a_preempted_sequence_can_be_aborted(released: bool) -> None:
    window, (one, other), (waiting,) = paused_and_waiting(1)
    if released:
        release(window)
    window.queue.abort(one)
    window.queue.resume(one)
    release(window)
    assert window.admit() == [waiting]
    window.queue.abort(other)
    window.queue.abort(waiting)
    release(window)
    assert (window.is_empty, window.queue.find(*one.request.key)) == (True, [])
    window.check_integrity()


# --- Large windows


def test_admitting_and_aborting_examine_few_of_ten_thousand_sequences() -> None:
    window = AdmittingWindow(8, QueueLimits(20_000))
    ranks = mock.Mock(side_effect=lambda owner: (owner.priority, owner.running, owner.since))
    with mock.patch("coordinator.scheduling.fair_queue.Request.rank", property(ranks)):
        sequences = submit(window, *(make_sequence(i, client=str(i % 100)) for i in range(10_000)))
        assert ranks.call_count <= 2 * len(sequences)
        ranks.reset_mock()
        for sequence in sequences[::2]:
            window.queue.abort(sequence)
        assert len(admit_all(window, 1000)) == 1007
        assert ranks.call_count <= 2 * 6007
    window.check_integrity()


# --- Preemption for clients and requests without a place


def crowded(max_num_seqs: int, **settings: Any) -> tuple[AdmittingWindow, list[Sequence]]:
    """A window full of one client's sequences, each with more cached tokens than the one before."""
    window = AdmittingWindow(max_num_seqs, QueueLimits(100), **settings)
    sequences = submit(window, *(make_sequence(i, max_tokens=1000, client="anne") for i in range(max_num_seqs)))
    window.admit()
    for sequence in sequences:
        sequence.target.commit(1 + sequence.sequence_id)
    return window, sequences


def test_a_client_without_a_place_preempts_the_sequence_with_the_least_progress() -> None:
    window, anne = crowded(3)
    (bob,) = submit(window, make_sequence(9, client="bob"))
    for _ in range(2):
        assert window.admit() == []
        assert (window.leaving, anne[0].target.num_cached_tokens, anne[0].is_preempted) == ({0}, 0, True)
    release(window)
    assert (window.admit(), window.queued) == ([bob], 1)
    assert window.admit() == []
    assert window.leaving == set(), "a preempted sequence preempts none of its own client"
    window.check_integrity()
    window.queue.abort(bob)
    release(window)
    assert (window.admit(), anne[0].is_preempted) == ([anne[0]], False)


@pytest.mark.parametrize(("max_num_seqs", "preempts"), [(1, True), (3, False)])
def test_the_last_place_of_a_client_and_fixed_batches_are_never_preempted(max_num_seqs: int, preempts: bool) -> None:
    window, anne = crowded(max_num_seqs, preempts=preempts)
    submit(window, make_sequence(9, client="bob"))
    assert window.admit() == []
    assert (window.leaving, list(window.ready)) == (set(), anne)


def test_requests_of_one_client_preempt_each_others_samples() -> None:
    window = AdmittingWindow(3, QueueLimits(100))
    samples = [make_sequence(i, request_id="many", client="anne") for i in range(5)]
    for sample in samples:
        sample.first_sample_id = 0
    window.queue.submit(samples)
    assert window.admit() == samples[:3]
    (single,) = submit(window, make_sequence(9, client="anne"))
    assert window.admit() == []
    assert len(window.leaving) == 1
    release(window)
    assert window.admit() == [single]
    for _ in range(3):
        assert window.admit() == []
        assert window.leaving == set(), "a preempted sample preempts none of its own request"
    window.check_integrity()
    window.queue.abort(single)
    release(window)
    assert len(window.admit()) == 1


def test_preempted_sequences_count_towards_client_limits() -> None:
    window = AdmittingWindow(2, QueueLimits(4, per_client=6))
    anne = [make_sequence(i, client="anne") for i in range(6)]
    submit(window, *anne[:2])
    window.admit()
    for earlier, sequence in zip(anne, anne[2:], strict=False):
        window.queue.pause(earlier)
        submit(window, sequence)
        window.admit()
        release(window)
        window.admit()
    assert window.queued == 0
    with pytest.raises(QueueLimitError, match="6 samples of this client"):
        window.queue.submit([make_sequence(7, client="anne")])
    for sequence in anne:
        window.queue.resume(sequence)
    assert window.queued == 4
    submit(window, *(make_sequence(i, client=str(i)) for i in range(10, 14)))
    window.check_integrity()


def test_sequences_in_a_round_are_not_preempted() -> None:
    window, anne = crowded(2)
    window.begin_round(anne)
    submit(window, make_sequence(9, client="bob"))
    window.admit()
    assert window.leaving == set()
    window.end_round(anne)
    window.admit()
    assert len(window.leaving) == 1


def test_an_aborted_sequence_is_not_ready_when_its_round_has_been_sent() -> None:
    """It could be preempted and queued again, although nobody reads it."""
    window, sequences = filled(2, 2)
    window.admit()
    window.begin_round(sequences)
    window.queue.abort(sequences[0])
    window.round_sent(sequences)
    window.check_integrity()
    assert list(window.ready) == sequences[1:]


@settings(max_examples=50)
@given(st.data())
def test_all_sequences_finish_despite_preemption(data: st.DataObject) -> None:
    window = AdmittingWindow(data.draw(st.integers(1, 4)), QueueLimits(1000))
    ids, num_requests = count(), 12
    unfinished: list[Sequence] = []
    while num_requests or unfinished:
        if num_requests and (not unfinished or data.draw(st.booleans())):
            num_requests -= 1
            client, first, n = data.draw(st.sampled_from("ab")), next(ids), data.draw(st.sampled_from([1, 1, 4]))
            numbers = [first, *(next(ids) for _ in range(n - 1))]
            samples = [make_sequence(i, request_id=str(first), max_tokens=2, client=client) for i in numbers]
            for sample in samples:
                sample.first_sample_id = first
            window.queue.submit(samples)
            unfinished += samples
        if data.draw(st.booleans()) and unfinished:
            (window.queue.resume if unfinished[0].paused else window.queue.pause)(unfinished[0])
        for sequence in unfinished if not num_requests else ():
            window.queue.resume(sequence)
        window.admit()
        group = list(window.ready)[: data.draw(st.integers(1, 4))]
        window.begin_round(group)
        for sequence in group:
            sequence.commit([7])
            sequence.target.commit(len(sequence.token_ids) - 1)
        window.end_round(group)
        release(window)
        window.check_integrity()
        unfinished = [sequence for sequence in unfinished if sequence.finish is None]
    assert (window.is_empty, window.queued, window.running) == (True, 0, 0)


def test_prompts_that_enter_at_once_do_not_count_as_waiting() -> None:
    window = AdmittingWindow(1, QueueLimits(9, tokens=50))
    for number in range(3):  # the first one enters with the next round
        request = GenerationRequest(f"r{number}", (1,) * 20, 4, frozenset(), num_speculative_tokens=0)
        window.queue.submit([Sequence(number, request)])
    assert window.queued == 3
