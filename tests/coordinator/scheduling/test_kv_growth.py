"""Clients share the pages of the KV cache: sequences take pages as they grow, and nobody starves."""

import random
from collections import Counter
from itertools import count
from typing import Any

import pytest
from admitting_window import AdmittingWindow
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.scheduling.admission import MAX_OVERTAKEN
from coordinator.scheduling.capacity import KVCapacity, QueueLimits
from coordinator.scheduling.preemption import is_protected, protected_tokens
from coordinator.scheduling.sequence import GenerationRequest, Sequence

POSITIONS, PAGE_SIZE = 2048, 64


class Simulation:
    """A window with a perfect worker, in which every round gives each ready sequence one token."""

    def __init__(self, positions: int = POSITIONS, max_num_seqs: int = 16, **settings: Any) -> None:
        self.window = AdmittingWindow(max_num_seqs, QueueLimits(10_000), **settings)
        self.window.fit(max_num_seqs, KVCapacity(positions // PAGE_SIZE, PAGE_SIZE))
        self.ids = count()
        self.preemptions: Counter[str] = Counter()
        self.rounds = 0

    def submit(self, client: str, prompt: int, max_tokens: int, n: int = 1, token: int = 0) -> list[Sequence]:
        """`prompt`: number of tokens. `token`: requests with the same one share pages; 0: of its own."""
        first = next(self.ids)
        prompt_ids = (token or 100 + first,) * prompt
        request = GenerationRequest(str(first), prompt_ids, max_tokens, frozenset(), 4, client=client)
        samples = [Sequence(first + i, request) for i in range(n)]
        for sample in samples:
            sample.first_sample_id = first
        for _ in samples[1:]:
            next(self.ids)
        self.window.queue.submit(samples)
        return samples

    def round(self, group_size: int = 16, gained: int = 1) -> None:
        window = self.window
        self.rounds += 1
        window.admit()
        self.preemptions.update(sequence.request.client for sequence in window.queue.preempted.values())
        group = list(window.ready)[:group_size]
        window.begin_round(group)
        for sequence in group:
            assert not window.pages.missing(sequence), "a draft may not fit"
            sequence.commit([7] * min(gained, 1 + max(0, sequence.max_num_draft_tokens)))
            sequence.target.commit(len(sequence.token_ids) - 1)
        window.end_round(group)
        assert not any(map(is_protected, window.cramped.values())), "it holds pages, which nobody can use"
        window.check_integrity()
        window.released(window.leaving)

    def run_until_done(self, *sequences: Sequence, rounds: int) -> int:
        before = self.rounds
        while any(sequence.finish is None for sequence in sequences):
            assert self.rounds - before < rounds, "it starves"
            self.round()
        return self.rounds - before


def test_a_long_answer_holds_the_pages_that_it_uses() -> None:
    simulation = Simulation()
    (hog,) = simulation.submit("hog", 20, 2000)
    simulation.round()
    assert simulation.window.pages.used == -(-(20 + 5 + protected_tokens(20)) // PAGE_SIZE)
    (short,) = simulation.submit("short", 20, 1)
    simulation.run_until_done(short, rounds=1)
    while hog.finish is None:
        length = max(hog.next_length, 20 + 5 + protected_tokens(20))
        assert simulation.window.pages[hog.sequence_id] == -(-min(length, 2020) // PAGE_SIZE)
        simulation.round()
    assert simulation.rounds <= 2001, "it never waits"


@pytest.mark.parametrize("client", ["short", "hog"])
def test_a_short_request_enters_a_full_cache_at_once(client: str) -> None:
    simulation = Simulation()
    (hog,) = simulation.submit("hog", 20, 2020)
    while len(hog.token_ids) < 2030:
        simulation.round()
    (short,) = simulation.submit(client, 20, 1)
    simulation.run_until_done(short, rounds=3)
    assert simulation.preemptions
    simulation.run_until_done(hog, rounds=30)


def test_a_short_request_does_not_wait_for_the_growth_of_longer_ones() -> None:
    """One long answer waits for the other. The short request takes the pages of the one that waits."""
    simulation = Simulation(positions=32 * POSITIONS)
    other, large = [*simulation.submit("b", 16_000, 4_000), *simulation.submit("a", 42_000, 16_000)]
    while large.sequence_id not in simulation.window.cramped:
        simulation.round()
        assert large.finish is None
    (short,) = simulation.submit("c", 1000, 1)
    simulation.run_until_done(short, rounds=3)
    assert set(simulation.preemptions) == {"a"}
    simulation.run_until_done(large, other, rounds=20_000)


@pytest.mark.parametrize("client", ["a", "b"])
def test_no_place_is_taken_for_a_sequence_that_would_not_fit(client: str) -> None:
    """Otherwise the place would go back to a sample of the same request, which loses it again at once."""
    simulation = Simulation(max_num_seqs=2)
    samples = simulation.submit("a", 300, 300, n=4)
    simulation.round()
    (long,) = simulation.submit(client, 1800, 100)
    simulation.run_until_done(*samples[:2], rounds=302)
    assert not simulation.preemptions
    simulation.run_until_done(long, *samples, rounds=1000)


def test_a_place_is_taken_for_a_sequence_that_fits_behind_one_that_does_not() -> None:
    simulation = Simulation(max_num_seqs=2)
    simulation.submit("a", 300, 300, n=4)
    simulation.round()
    simulation.submit("b", 1800, 100)
    (short,) = simulation.submit("c", 20, 1)
    simulation.run_until_done(short, rounds=2)


def test_neither_a_repeating_hog_nor_endless_short_requests_starve() -> None:
    simulation = Simulation()
    hogs, waits, finished_hogs = simulation.submit("hog", 20, 2000), [], 0
    shorts: dict[Sequence, int] = {}
    while simulation.rounds < 12_000:
        while len(shorts) < 4:
            (short,) = simulation.submit("short", 40, 60)
            shorts[short] = simulation.rounds
        if hogs[0].finish is not None:
            hogs, finished_hogs = simulation.submit("hog", 20, 2000), finished_hogs + 1
        simulation.round()
        for short in [short for short in shorts if short.finish is not None]:
            waits.append(simulation.rounds - shorts.pop(short) - 60)
    waits.sort()
    assert finished_hogs >= 3
    assert waits[len(waits) // 2] <= 4
    assert waits[-1] <= protected_tokens(2020) + 64 + 60, "a returning hog is protected for so many rounds"
    assert simulation.preemptions["short"] == 0


def test_two_long_answers_do_not_take_turns() -> None:
    """One waits for the other instead: prefilling both again and again would cost more."""
    simulation = Simulation()
    hogs = [*simulation.submit("a", 20, 1500), *simulation.submit("b", 20, 1500)]
    while any(hog.finish is None for hog in hogs):
        simulation.round()
        assert simulation.rounds < 4000
    assert simulation.preemptions.total() == 1


def test_a_long_request_is_overtaken_only_so_often() -> None:
    simulation = Simulation(max_num_seqs=4)
    for i in range(3):
        simulation.submit(f"other {i}", 500, 100)
    simulation.round()
    (long,) = simulation.submit("long", 1500, 10)
    for i in range(60):
        simulation.submit(f"short {i}", 20, 10)
    while long.num_generated == 0:
        simulation.round()
        assert long.overtaken <= MAX_OVERTAKEN
        assert simulation.rounds < 400
    assert simulation.window.queued > 0


def test_paused_sequences_give_up_their_pages_first() -> None:
    simulation = Simulation(positions=1024)
    (idle,) = simulation.submit("a", 400, 100)
    simulation.round()
    simulation.window.queue.pause(idle)
    (busy,) = simulation.submit("b", 400, 600)
    simulation.run_until_done(busy, rounds=620)
    assert idle.is_preempted
    simulation.window.queue.resume(idle)
    simulation.run_until_done(idle, rounds=110)


@pytest.mark.parametrize("evicted", [False, True])
def test_a_preempted_sequence_finds_its_pages_until_they_are_evicted(evicted: bool) -> None:
    simulation = Simulation()
    (sequence,) = simulation.submit("a", 20, 700)
    while len(sequence.token_ids) < 3 * PAGE_SIZE:
        simulation.round()
    window = simulation.window
    window.preempt(sequence)
    window.released(window.leaving)
    if evicted:
        window.forget_pages(sequence.page_digests(PAGE_SIZE, 2 * PAGE_SIZE)[1:])
    window.admit()
    assert list(window.ready) == [sequence]
    assert sequence.target.start == sequence.draft.predicted == (1 if evicted else 2) * PAGE_SIZE


def test_samples_share_the_pages_of_their_prompt() -> None:
    """Eight copies of the prompt would not fit."""
    simulation = Simulation()
    samples = simulation.submit("a", 1024, 60, n=8)
    simulation.round()
    assert simulation.window.pages.used == 1024 // PAGE_SIZE + 8
    simulation.run_until_done(*samples, rounds=120)
    assert not simulation.preemptions


def test_a_window_without_preemption_ends_a_standstill() -> None:
    simulation = Simulation(positions=1024, preempts=False)
    sequences = [*simulation.submit("a", 20, 900), *simulation.submit("b", 20, 900)]
    simulation.run_until_done(*sequences, rounds=2000)
    assert simulation.preemptions.total() == 1


def test_a_sequence_without_room_in_the_worker_gives_up_its_place() -> None:
    """Another coordinator uses the same worker."""
    simulation = Simulation()
    (sequence,) = simulation.submit("a", 20, 500)
    simulation.round()
    group = list(simulation.window.ready)
    simulation.window.begin_round(group)
    sequence.target.refuse_room()
    simulation.window.end_round(group)
    assert simulation.window.leaving == {sequence.sequence_id}
    simulation.window.released(simulation.window.leaving)
    simulation.run_until_done(sequence, rounds=510)


REQUESTS = st.tuples(
    st.sampled_from("abc"),
    st.integers(1, 300),
    st.integers(1, 200),
    st.sampled_from([1, 1, 1, 3]),
    st.integers(0, 2),
)


@settings(max_examples=100)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=8),
    positions=st.sampled_from([512, 576, 768, 1024]),
    max_num_seqs=st.integers(1, 6),
    chance=st.randoms(use_true_random=False),
)
def test_every_sequence_finishes(
    requests: list[tuple[str, int, int, int, int]], positions: int, max_num_seqs: int, chance: random.Random
) -> None:
    """Whatever arrives, pauses and is aborted, nothing is lost and no page is held twice."""
    simulation = Simulation(positions, max_num_seqs)
    unfinished: list[Sequence] = []
    while requests or unfinished:
        if requests and chance.random() < 0.5:
            unfinished += simulation.submit(*requests.pop())
        gained = chance.randint(1, 5)
        for _ in range(chance.randint(1, 30)):
            simulation.round(gained=gained)
        queue = simulation.window.queue
        acts = [queue.pause, queue.resume, queue.resume, queue.abort]
        for sequence in unfinished:
            if not requests:
                simulation.window.queue.resume(sequence)
            elif chance.random() < 0.1:
                chance.choice(acts)(sequence)
        unfinished = [sequence for sequence in unfinished if sequence.finish is None]
        assert simulation.rounds < 10_000, "a sequence starves"
    simulation.round()
    assert simulation.window.is_empty
    assert simulation.window.kv_usage == 0
