"""Which waiting sequence enters the window next: the queue against a model that looks at everything; its promises."""

from collections import Counter
from unittest import mock

import pytest
from fair_rule import FairRule
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.scheduling import ranking
from coordinator.scheduling.fair_queue import FairQueue
from coordinator.scheduling.ranking import Ranking
from coordinator.scheduling.sequence import GenerationRequest, Sequence


def samples(first_id: int, n: int = 1, client: str = "", priority: int = 0) -> list[Sequence]:
    request = GenerationRequest(str(first_id), (1,) * 3, 9, frozenset(), 4, client=client, priority=priority)
    return [Sequence(first_id + i, request) for i in range(n)]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 4), st.sampled_from("abc"), st.integers(-1, 1)),
        st.tuples(st.sampled_from(["enter", "leave", "discard"]), st.integers(0, 99)),
    ),
    max_size=80,
)


@given(steps=STEPS)
def test_the_next_is_the_one_that_the_rule_says(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    queue, rule, ids = FairQueue(), FairRule(), 0
    with mock.patch.object(ranking, "MAX_STALE", 2):
        for step in steps:
            if step[0] == "add":
                new = samples(ids, *step[1:])
                ids += len(new)
                queue.add(new)
                rule.add(new)
            elif step[0] == "leave" and rule.running:
                gone = rule.running.pop(step[1] % len(rule.running))
                queue.leave(gone.sequence_id)
            elif step[0] == "discard" and rule.waiting:
                gone = rule.waiting.pop(step[1] % len(rule.waiting))
                queue.discard(gone)
            elif step[0] == "enter" and rule.waiting:
                assert queue.next is rule.next
                rule.enter(queue.next)
                queue.enter(queue.next)
            queue.check_integrity()
            assert list(queue) == rule.waiting
            for client in "abc":
                assert queue.running_of(client) == rule.number_of(client)
                assert queue.waiting_of(client) == sum(s.request.client == client for s in rule.waiting)
    for sequence in rule.running:
        queue.leave(sequence.sequence_id)
    for sequence in rule.waiting:
        queue.discard(sequence)
    assert (queue._clients, queue._places, queue.tokens, len(queue._turns)) == ({}, {}, 0, 0)


@given(
    window=st.integers(1, 6),
    demand=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 4), min_size=1),
)
@settings(max_examples=30)
def test_clients_that_always_wait_get_the_same_number_of_places(window: int, demand: dict[str, int]) -> None:
    """Whatever number of samples their requests have."""
    queue, running, ids = FairQueue(), [], 0
    entered: Counter[str] = Counter()
    for _ in range(40 * len(demand)):
        for client, n in demand.items():
            while queue.waiting_of(client) < 8:
                queue.add(samples(ids, n, client))
                ids += n
        while len(running) < window:
            running.append(queue.next)
            entered[queue.next.request.client] += 1
            queue.enter(queue.next)
        in_window = [queue.running_of(client) for client in demand]
        assert max(in_window) - min(in_window) <= 1
        assert max(entered.values()) - min(entered[client] for client in demand) <= 1
        queue.leave(running.pop(0).sequence_id)


@pytest.mark.parametrize("window", [1, 3])
def test_nobody_starves_behind_those_that_keep_coming(window: int) -> None:
    """A request waits for its turn: once for each client, and for each request of its own that came before it."""
    queue, running, ids = FairQueue(), [], 100
    (patient,) = samples(0, client="patient")
    queue.add([patient])
    for turn in range(4 * window + 4):
        for _ in range(2):  # strangers that come and go, and a neighbour of many samples
            queue.add(samples(ids, client=f"stranger {turn % 2}"))
            queue.add(samples(ids + 1, 8, client="patient"))
            ids += 9
        while len(running) < window:
            running.append(queue.next)
            queue.enter(queue.next)
        if patient in running:
            return
        queue.leave(running.pop(0).sequence_id)
    raise AssertionError("it never entered")


def test_a_client_that_comes_again_and_again_is_not_new_each_time() -> None:
    """One place: a client whose requests come one at a time takes turns with one that has many waiting."""
    queue, entered = FairQueue(), []
    for i in range(10):
        queue.add(samples(i, client="many"))
    queue.add(samples(100, client="one"))
    for i in range(101, 107):
        sequence = queue.next
        entered.append(sequence.request.client)
        queue.enter(sequence)
        if sequence.request.client == "one":
            queue.add(samples(i, client="one"))
        queue.leave(sequence.sequence_id)
    assert entered == ["many", "one"] * 3


def test_ranks_that_change_leave_a_heap_no_larger_than_its_items() -> None:
    turns: Ranking[int] = Ranking()
    for i in range(10_000):
        turns.put(i % 50, (i * 7919 % 1000, i))
        turns.put(10_000 + i, (10**6, i))  # comes last, and leaves before its turn
        turns.discard(10_000 + i)
    assert len(turns) == 50
    assert len(turns._heap) <= 2 * 51 + ranking.MAX_STALE
    assert turns.first == min(turns._ranks, key=turns._ranks.__getitem__)
