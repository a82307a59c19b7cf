"""Grouping policies: pure functions of the window's state that keep their limits and starve no sequence."""

import random
from collections.abc import Callable
from itertools import count, pairwise

import pytest
from admitting_window import AdmittingWindow
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.scheduling.capacity import QueueLimits
from coordinator.scheduling.grouping import POLICIES, Exspec, Group, GroupingLimits, Policy, ReadySet
from coordinator.scheduling.sequence import GenerationRequest, Sequence


def make_sequence(sequence_id: int, length: int, max_tokens: int = 8) -> Sequence:
    return Sequence(sequence_id, GenerationRequest(str(sequence_id), (0,) * length, max_tokens, frozenset(), 4))


def make_sequences(lengths: list[int]) -> list[Sequence]:
    return [make_sequence(i, length) for i, length in enumerate(lengths)]


def ids_of(sequences: list[Sequence]) -> list[int]:
    return [sequence.sequence_id for sequence in sequences]


def chosen(policy: Policy, lengths: list[int], rounds: int = 0) -> list[int]:
    """Ids, which are indices of `lengths`."""
    return ids_of(policy.choose(ReadySet(make_sequences(lengths)), rounds).sequences)


all_limits = st.builds(
    GroupingLimits,
    max_batch_size=st.integers(1, 6),
    min_group_size=st.integers(1, 6),
    max_wait_rounds=st.integers(0, 6),
    prefer=st.sampled_from(["largest", "oldest"]),
)


@given(
    lengths=st.lists(st.integers(1, 5), max_size=20),
    limits=all_limits,
    name=st.sampled_from(sorted(POLICIES)),
    rounds=st.integers(0, 10),
)
def test_every_policy_is_pure_and_keeps_the_batch_limit(
    lengths: list[int], limits: GroupingLimits, name: str, rounds: int
) -> None:
    ready = make_sequences(lengths)
    before = [(s.token_ids.copy(), s.shape, s.ready_since) for s in ready]
    group = POLICIES[name](limits).choose(ReadySet(ready), rounds)
    assert len(group.sequences) <= limits.max_batch_size
    assert len(set(ids_of(group.sequences))) == len(group.sequences)
    assert all(s in ready for s in group.sequences)
    assert bool(group.sequences) == bool(ready)
    assert [(s.token_ids, s.shape, s.ready_since) for s in ready] == before
    assert POLICIES[name](limits).choose(ReadySet(ready), rounds) == group


@given(lengths=st.lists(st.integers(1, 50), max_size=20), limit=st.integers(1, 25))
def test_ragged_ignores_lengths(lengths: list[int], limit: int) -> None:
    assert chosen(POLICIES["ragged"](GroupingLimits(limit)), lengths) == list(range(len(lengths)))[:limit]


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=20), limits=all_limits)
def test_exspec_takes_equal_lengths_unless_there_are_too_few(lengths: list[int], limits: GroupingLimits) -> None:
    group = Exspec(limits).choose(ReadySet(make_sequences(lengths)), 0)
    min_size = min(limits.min_group_size, len(lengths))
    large_enough = [n for n in set(lengths) if min(lengths.count(n), limits.max_batch_size) >= min_size]
    oldest_is_due = limits.max_wait_rounds == 0
    if not group.fallback:
        assert group.same_length
        assert len(group.sequences) >= min_size
    elif not oldest_is_due:
        assert not large_enough
    if oldest_is_due or group.fallback:
        assert 0 in ids_of(group.sequences), "the oldest sequence was left out"


def test_exspec_prefers_the_largest_or_the_oldest_group() -> None:
    lengths = [9, 7, 7, 5, 5, 5, 9]
    largest, oldest = (Exspec(GroupingLimits(4, 2, 8, prefer)) for prefer in ("largest", "oldest"))
    assert chosen(largest, lengths) == [3, 4, 5]
    assert chosen(oldest, lengths) == [0, 6]
    assert chosen(oldest, [1, 7, 7]) == [1, 2], "groups that are too small are skipped"


def test_exspec_serves_a_sequence_that_waited_too_long() -> None:
    policy = Exspec(GroupingLimits(4, 2, max_wait_rounds=3))
    lengths = [9, 5, 5, 5, 9]
    assert chosen(policy, lengths, rounds=2) == [1, 2, 3]
    assert chosen(policy, lengths, rounds=3) == [0, 4]
    assert chosen(policy, [8, 5, 5, 5, 9], rounds=3) == [0, 4, 1, 2], "no other has its length: a mixed group"


def test_mixed_groups_contain_the_oldest_and_the_nearest_in_length() -> None:
    group = Exspec(GroupingLimits(3, 2)).choose(ReadySet(make_sequences([50, 90, 48, 10, 53])), 0)
    assert ids_of(group.sequences) == [0, 2, 4]
    assert group.fallback
    assert not group.same_length


def test_same_length_includes_caches_and_draft_lengths() -> None:
    one, other = make_sequences([6, 6])
    one.target.commit(5)
    assert not Group([one, other]).same_length
    other.target.commit(5)
    assert Group([one, other]).same_length
    one.draft.commit(4)
    other.draft.commit(5)
    assert Group([one, other]).same_length, "one pass takes one token or two"
    other.draft.commit(3)
    assert not Group([one, other]).same_length
    ending = make_sequence(2, 6, max_tokens=2)
    ending.target.commit(5)
    ending.draft.commit(4)
    assert not Group([one, ending]).same_length, "its draft is shorter"


def test_eqspec_admits_until_the_first_token_and_again_once_all_have_left() -> None:
    policy = POLICIES["eqspec"](GroupingLimits(3))
    assert policy.admissible([], leaving=0, capacity=8) == 3
    batch = make_sequences([4, 5])
    assert policy.admissible(batch, leaving=0, capacity=8) == 1
    batch[0].commit([1])
    assert policy.admissible(batch, leaving=0, capacity=8) == 0
    assert policy.admissible(batch[1:], leaving=1, capacity=8) == 2, "one was aborted before the first token"
    batch[1].commit([1])
    assert policy.admissible(batch[1:], leaving=0, capacity=8) == 0
    assert policy.admissible([], leaving=2, capacity=8) == 0
    assert policy.admissible([], leaving=0, capacity=2) == 2


# --- A window under load


def serve_all(
    policy: Policy, window: AdmittingWindow, arrivals: list[Sequence], gain: Callable[[], int]
) -> list[list[Sequence]]:
    """Run rounds until all have finished. Two sequences arrive before every round."""
    groups: list[list[Sequence]] = []
    waiting, unfinished = iter(arrivals), len(arrivals)
    while unfinished:
        for newcomer in (next(waiting, None), next(waiting, None)):
            if newcomer is not None:
                window.queue.submit([newcomer])
        window.admit(policy.admissible(window.members, len(window.leaving), window.capacity))
        group = policy.choose(window.ready, window.rounds).sequences
        window.begin_round(group)
        for member in group:
            member.target.commit(len(member.token_ids))
            member.commit([0] * gain())
            unfinished -= member.finish is not None
        window.end_round(group)
        window.check_integrity()
        window.released(window.leaving)
        groups.append(group)
        assert len(groups) < 100_000, "the sequences never finish"
    return groups


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    limits=all_limits,
    max_num_seqs=st.integers(1, 24),
    by_length=st.booleans(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    seed=st.integers(0, 99),
)
def test_all_sequences_finish_without_starving(
    name: str, limits: GroupingLimits, max_num_seqs: int, by_length: bool, lengths: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    arrivals = [make_sequence(i, length, max_tokens=rng.randint(1, 40)) for i, length in enumerate(lengths)]
    window = AdmittingWindow(max_num_seqs, QueueLimits(100), by_length=by_length)
    groups = serve_all(POLICIES[name](limits), window, arrivals, gain=lambda: rng.randint(1, 5))
    turns: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        for member in group:
            turns.setdefault(member.sequence_id, []).append(number)
    assert len(turns) == len(arrivals)
    # After max_wait_rounds a sequence is first in line, behind at most the whole window.
    waits = [later - earlier for own in turns.values() for earlier, later in pairwise(own)]
    assert max(waits, default=0) <= limits.max_wait_rounds + max_num_seqs + 1


def test_admission_by_length_keeps_neighbours_equally_long() -> None:
    window = AdmittingWindow(5, QueueLimits(9), by_length=True)
    for newcomer in make_sequences([50, 9, 52, 90, 49]):
        window.queue.submit([newcomer])
    assert ids_of(window.admit()) == [1, 4, 0, 2, 3]


def test_admission_by_length_starves_no_sequence() -> None:
    window = AdmittingWindow(1, QueueLimits(9), by_length=True)
    long, ids = make_sequence(0, 500), count(1)
    window.queue.submit([long])
    for _ in range(100):
        short = [make_sequence(next(ids), 5) for _ in range(2)]
        for sequence in short:
            window.queue.submit([sequence])
        (admitted,) = window.admit()
        if admitted is long:
            return
        for sequence in short:
            window.queue.abort(sequence)
        window.released(window.leaving)
    raise AssertionError("the long prompt never entered")


@pytest.mark.parametrize("prefer", ["largest", "oldest"])
def test_a_sequence_keeps_the_shape_it_had_when_it_became_ready(prefer: str) -> None:
    """Even if the prediction of its cached prefix fails afterwards."""
    (member,) = make_sequences([40])
    member.target.predicted = member.draft.predicted = 32
    ready = ReadySet([member])
    member.target.miss()
    member.draft.miss()
    assert Exspec(GroupingLimits(2, 2, 8, prefer)).choose(ready, 0).sequences == [member]  # type: ignore[arg-type]
    assert ready.pop(0) is member
