"""Grouping policies are pure functions of the pool's state; none starves anybody, and each keeps its limits."""

import random
from collections.abc import Callable
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.scheduling.capacity import QueueLimits
from coordinator.scheduling.grouping import POLICIES, Exspec, Group, GroupingLimits, Policy
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.ready import ReadySet
from coordinator.scheduling.sequence import GenerationRequest, Prefix, Sequence


def sequence(sequence_id: int, length: int, max_tokens: int = 8, waited_since: int = 0) -> Sequence:
    made = Sequence(sequence_id, GenerationRequest(str(sequence_id), (0,) * length, max_tokens, frozenset(), 4))
    made.ready_since = waited_since
    return made


def sequences(lengths: list[int]) -> list[Sequence]:
    return [sequence(i, length) for i, length in enumerate(lengths)]


def chosen(policy: Policy, lengths: list[int], played: int = 0) -> list[int]:
    """Ids, which are indices of `lengths`."""
    return [s.sequence_id for s in policy.choose(ReadySet(sequences(lengths)), played).sequences]


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
    played=st.integers(0, 10),
)
def test_every_policy_keeps_the_limit_and_serves_somebody_once(
    lengths: list[int], limits: GroupingLimits, name: str, played: int
) -> None:
    ready = sequences(lengths)
    group = POLICIES[name](limits).choose(ReadySet(ready), played)
    assert len(group.sequences) <= limits.max_batch_size
    assert len({s.sequence_id for s in group.sequences}) == len(group.sequences)
    assert all(s in ready for s in group.sequences)
    assert bool(group.sequences) == bool(ready)


@given(lengths=st.lists(st.integers(1, 50), max_size=20), limit=st.integers(1, 25))
def test_ragged_takes_those_that_waited_longest_whatever_their_lengths(lengths: list[int], limit: int) -> None:
    assert chosen(POLICIES["ragged"](GroupingLimits(limit)), lengths) == list(range(len(lengths)))[:limit]


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=20), limits=all_limits)
def test_exspec_takes_equal_lengths_unless_there_are_too_few(lengths: list[int], limits: GroupingLimits) -> None:
    group = Exspec(limits).choose(ReadySet(sequences(lengths)), 0)
    enough = min(limits.min_group_size, len(lengths))
    possible = [length for length in set(lengths) if min(lengths.count(length), limits.max_batch_size) >= enough]
    waited_too_long = limits.max_wait_rounds == 0
    if not group.fallback:
        assert group.same_length
        assert len(group.sequences) >= enough
    elif not waited_too_long:
        assert not possible
    if waited_too_long or group.fallback:
        assert 0 in [s.sequence_id for s in group.sequences], "the one that waited longest is left behind"


def test_exspec_prefers_the_largest_group_or_the_oldest_one() -> None:
    lengths = [9, 7, 7, 5, 5, 5, 9]
    largest, oldest = (Exspec(GroupingLimits(4, 2, 8, prefer)) for prefer in ("largest", "oldest"))
    assert chosen(largest, lengths) == [3, 4, 5]
    assert chosen(oldest, lengths) == [0, 6]
    # A group that is too small is passed over, however old.
    assert chosen(oldest, [1, 7, 7]) == [1, 2]


def test_exspec_serves_first_who_waited_too_long() -> None:
    policy = Exspec(GroupingLimits(4, 2, max_wait_rounds=3))
    lengths = [9, 5, 5, 5, 9]
    assert chosen(policy, lengths, played=2) == [1, 2, 3]
    assert chosen(policy, lengths, played=3) == [0, 4]
    assert chosen(policy, [8, 5, 5, 5, 9], played=3) == [0, 4, 1, 2], "nobody is as long: a mixed group"


def test_a_mixed_group_has_the_oldest_and_those_nearest_in_length() -> None:
    group = Exspec(GroupingLimits(3, 2)).choose(ReadySet(sequences([50, 90, 48, 10, 53])), 0)
    assert [s.sequence_id for s in group.sequences] == [0, 2, 4]
    assert group.fallback
    assert not group.same_length


def test_equal_length_with_unequal_caches_is_not_the_same() -> None:
    cached, fresh = sequences([6, 6])
    cached.num_cached_tokens = 5
    assert not Group([cached, fresh]).same_length
    fresh.num_cached_tokens = 5
    assert Group([cached, fresh]).same_length
    cached.num_draft_cached_tokens, fresh.num_draft_cached_tokens = 4, 5
    assert Group([cached, fresh]).same_length, "one token or two are fed in one pass"
    fresh.num_draft_cached_tokens = 3
    assert not Group([cached, fresh]).same_length
    with_less_to_go = sequence(2, 6, max_tokens=2)
    with_less_to_go.num_cached_tokens, with_less_to_go.num_draft_cached_tokens = 5, 4
    assert not Group([cached, with_less_to_go]).same_length, "its draft would be shorter"


def test_eqspec_admits_until_the_first_token_and_then_nobody_until_all_have_left() -> None:
    policy = POLICIES["eqspec"](GroupingLimits(3))
    assert policy.admissible([], leaving=0, capacity=8) == 3
    batch = sequences([4, 5])
    assert policy.admissible(batch, leaving=0, capacity=8) == 1
    batch[0].commit([1])
    assert policy.admissible(batch, leaving=0, capacity=8) == 0
    assert policy.admissible(batch[1:], leaving=1, capacity=8) == 2, "one that was aborted before all began"
    batch[1].commit([1])
    assert policy.admissible(batch[1:], leaving=0, capacity=8) == 0
    assert policy.admissible([], leaving=2, capacity=8) == 0
    assert policy.admissible([], leaving=0, capacity=2) == 2


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_choosing_changes_nothing(name: str) -> None:
    ready = sequences([3, 1, 2, 3])
    before = [(s.token_ids.copy(), s.shape, s.ready_since) for s in ready]
    group = POLICIES[name](GroupingLimits(2)).choose(ReadySet(ready), 5)
    assert [(s.token_ids, s.shape, s.ready_since) for s in ready] == before
    again = POLICIES[name](GroupingLimits(2)).choose(ReadySet(ready), 5)
    assert again == group


# --- A pool under load, from the first arrival to the last token


def serve_all(policy: Policy, pool: Pool, arrivals: list[Sequence], gain: Callable[[], int]) -> list[list[Sequence]]:
    """Plays rounds until all have finished; a few arrive before every round. Checks the pool in each."""
    rounds: list[list[Sequence]] = []
    waiting = iter(arrivals)
    unfinished = len(arrivals)
    while unfinished:
        for _ in range(2):
            if (newcomer := next(waiting, None)) is not None:
                pool.submit([newcomer])
        pool.admit(policy.admissible(pool.members, len(pool.leaving), pool.capacity))
        pool.check_integrity()
        group = policy.choose(pool.ready, pool.rounds).sequences
        pool.begin_round(group)
        for member in group:
            member.num_cached_tokens = len(member.token_ids)
            member.commit([0] * gain())
            unfinished -= member.finish is not None
        pool.end_round(group)
        pool.check_integrity()
        pool.released(pool.leaving)
        rounds.append(group)
        assert len(rounds) < 100_000, "it never ends"
    return rounds


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    limits=all_limits,
    window=st.integers(1, 24),
    by_length=st.booleans(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    seed=st.integers(0, 99),
)
def test_everybody_finishes_and_nobody_waits_for_long(
    name: str, limits: GroupingLimits, window: int, by_length: bool, lengths: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    arrivals = [sequence(i, length, max_tokens=rng.randint(1, 40)) for i, length in enumerate(lengths)]
    pool = Pool(window, QueueLimits(100), by_length=by_length)
    rounds = serve_all(POLICIES[name](limits), pool, arrivals, gain=lambda: rng.randint(1, 5))
    played: dict[int, list[int]] = {}
    for number, group in enumerate(rounds):
        for member in group:
            played.setdefault(member.sequence_id, []).append(number)
    assert sorted(played) == sorted(s.sequence_id for s in arrivals)
    # After max_wait rounds one is first in line, behind no more than the window.
    waits = [later - one for turns in played.values() for one, later in pairwise(turns)]
    assert max(waits, default=0) <= limits.max_wait_rounds + window + 1


def test_a_thousand_sequences_in_a_window_of_hundreds() -> None:
    rng = random.Random(3)
    arrivals = [sequence(i, rng.randint(1, 200), max_tokens=rng.randint(1, 60)) for i in range(1000)]
    for name, make in POLICIES.items():
        pool = Pool(300, QueueLimits(1000))
        fresh = [sequence(s.sequence_id, len(s.token_ids), s.request.max_tokens) for s in arrivals]
        rounds = serve_all(make(GroupingLimits(8, 4)), pool, fresh, gain=lambda: rng.randint(1, 5))
        assert all(s.finish is not None for s in fresh), name
        assert max(map(len, rounds)) <= 8


def test_newcomers_of_about_one_length_follow_each_other_on_request() -> None:
    pool = Pool(5, QueueLimits(9), by_length=True)
    for newcomer in sequences([50, 9, 52, 90, 49]):
        pool.submit([newcomer])
    assert [s.sequence_id for s in pool.admit()] == [1, 4, 0, 2, 3]


def test_admission_by_length_passes_nobody_over_for_ever() -> None:
    pool = Pool(1, QueueLimits(9), by_length=True)
    long, ids = sequence(0, 500), count(1)
    pool.submit([long])
    for _ in range(100):
        pool.submit([sequence(next(ids), 5)])
        pool.submit([sequence(next(ids), 5)])
        (admitted,) = pool.admit()
        pool.abort(admitted)
        pool.released(pool.leaving)
        if admitted is long:
            return
        pool.abort(next(s for i in range(next(ids)) for s in pool.find("", str(i)) if s is not long))
    raise AssertionError("the long prompt never entered")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=60))
def test_the_ready_set_keeps_both_orders(steps: list[tuple[bool, int]]) -> None:
    ready, model, ids = ReadySet(), [], count()
    for adds, number in steps:
        if adds:
            newcomer = sequence(next(ids), number)
            ready.add(newcomer)
            model.append(newcomer)
        elif model:
            assert ready.pop(model[number % len(model)].sequence_id) is model.pop(number % len(model))
        assert list(ready) == model
        assert len(ready) == len(model)
        for member in model:
            assert member.sequence_id in ready
            assert ready.same_shape(member, 99) == [other for other in model if other.shape == member.shape]
        assert sum(map(len, ready.by_shape.values())) == len(model)
        if model:
            assert ready.oldest is model[0]


def test_a_sequence_is_grouped_by_the_shape_it_had_when_it_became_ready() -> None:
    """What it could copy of another may be lost meanwhile."""
    source, member = sequence(0, 40), sequence(1, 40)
    source.num_cached_tokens = source.num_draft_cached_tokens = 39
    member.target_prefix = member.draft_prefix = Prefix(source, 39)
    for policy in (Exspec(GroupingLimits(2, 2, 8, prefer)) for prefer in ("largest", "oldest")):
        ready = ReadySet([member])
        source.num_cached_tokens = source.num_draft_cached_tokens = 0
        assert policy.choose(ready, 0).sequences == [member]
        assert ready.pop(1) is member
        source.num_cached_tokens = source.num_draft_cached_tokens = 39
