"""The fair queue against a naive model, and its promises."""

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
def test_next_sequence_matches_the_naive_rule(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    queue, rule, ids = FairQueue(), FairRule(), 0
    with mock.patch.object(ranking, "MAX_STALE", 2):
        for step in steps:
            if step[0] == "add":
                new = samples(ids, *step[1:])
                ids += len(new)
                queue.add(new)
                rule.add(new)
            elif step[0] == "leave" and rule.running:
                removed = rule.running.pop(step[1] % len(rule.running))
                queue.leave(removed.sequence_id)
            elif step[0] == "discard" and rule.waiting:
                removed = rule.waiting.pop(step[1] % len(rule.waiting))
                queue.discard(removed)
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
def test_clients_that_always_wait_get_equal_shares(window: int, demand: dict[str, int]) -> None:
    """However many samples their requests have."""
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
def test_no_request_starves_behind_new_arrivals(window: int) -> None:
    """A request waits for one turn of each client, and of each earlier request of its own client."""
    queue, running, ids = FairQueue(), [], 100
    (patient,) = samples(0, client="patient")
    queue.add([patient])
    for turn in range(4 * window + 4):
        for _ in range(2):  # other clients come and go, and its own client sends many samples
            queue.add(samples(ids, client=f"other {turn % 2}"))
            queue.add(samples(ids + 1, 8, client="patient"))
            ids += 9
        while len(running) < window:
            running.append(queue.next)
            queue.enter(queue.next)
        if patient in running:
            return
        queue.leave(running.pop(0).sequence_id)
    raise AssertionError("it never entered the window")


def test_the_heap_of_a_ranking_stays_small() -> None:
    turns: Ranking[int] = Ranking()
    for i in range(10_000):
        turns.put(i % 50, (i * 7919 % 1000, i))
        turns.put(10_000 + i, (10**6, i))  # leaves before its turn
        turns.discard(10_000 + i)
    assert len(turns) == 50
    assert len(turns._heap) <= 2 * 51 + ranking.MAX_STALE
    assert turns.first == min(turns._ranks, key=turns._ranks.__getitem__)


def test_a_sequence_is_queued_once() -> None:
    queue, new = FairQueue(), samples(1)
    queue.add(new)
    with pytest.raises(AssertionError, match="queued twice"):
        queue.add(new)
