"""Grouping policies are pure functions of the pool's state."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.grouping import POLICIES, ragged
from coordinator.sequence import GenerationRequest, Sequence


def sequences(lengths: list[int]) -> list[Sequence]:
    return [
        Sequence(i, GenerationRequest(str(i), (0,) * length, 8, frozenset(), 4)) for i, length in enumerate(lengths)
    ]


@given(lengths=st.lists(st.integers(1, 50), max_size=20), limit=st.integers(1, 25))
def test_ragged_takes_those_that_waited_longest_whatever_their_lengths(lengths: list[int], limit: int) -> None:
    ready = sequences(lengths)
    assert ragged(iter(ready), limit) == ready[:limit]


@given(lengths=st.lists(st.integers(1, 50), max_size=20), limit=st.integers(1, 25))
def test_every_policy_keeps_the_limit_and_serves_somebody_once(lengths: list[int], limit: int) -> None:
    ready = sequences(lengths)
    for policy in POLICIES.values():
        group = policy(ready, limit)
        assert len(group) <= limit
        assert len({sequence.sequence_id for sequence in group}) == len(group)
        assert all(sequence in ready for sequence in group)
        assert bool(group) == bool(ready)


def test_ragged_changes_nothing() -> None:
    ready = sequences([3, 1, 2])
    before = [(sequence.token_ids.copy(), sequence.target_length, sequence.draft_length) for sequence in ready]
    ragged(ready, 2)
    assert [(sequence.token_ids, sequence.target_length, sequence.draft_length) for sequence in ready] == before
