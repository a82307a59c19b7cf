"""Committing verified tokens, and speculation statistics."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from coordinator.scheduling.speculation import SpeculationStats

TOKENS = st.integers(0, 9)


def make_sequence(
    prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8, stops: frozenset[int] = frozenset(), k: int = 4
) -> Sequence:
    return Sequence(1, GenerationRequest("r", prompt, max_tokens, stops, k))


def commit_one_by_one(gained: list[int], max_tokens: int, stops: frozenset[int]) -> tuple[list[int], Finish | None]:
    for count, token in enumerate(gained, 1):
        if token in stops:
            return gained[:count], Finish(FinishReason.STOP, token)
        if count == max_tokens:
            return gained[:count], Finish(FinishReason.LENGTH)
    return gained, None


@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=3).map(tuple),
    runs=st.lists(st.lists(TOKENS, min_size=1, max_size=6), max_size=8),
    max_tokens=st.integers(1, 20),
    stops=st.frozensets(TOKENS, max_size=3),
)
def test_commits_end_where_token_by_token_decoding_ends(
    prompt: tuple[int, ...], runs: list[list[int]], max_tokens: int, stops: frozenset[int]
) -> None:
    sequence = make_sequence(prompt, max_tokens, stops)
    kept = [token for gained in runs for token in sequence.commit(gained)[0]]
    expected, finish = commit_one_by_one([token for gained in runs for token in gained], max_tokens, stops)
    assert kept == sequence.generated_ids == expected
    assert sequence.finish == finish
    assert sequence.token_ids == [*prompt, *expected]
    assert sequence.num_generated == len(expected)


@pytest.mark.parametrize(
    ("generated", "k", "limit"), [(0, 4, 4), (4, 4, 3), (6, 4, 1), (7, 4, 0), (0, 0, 0), (0, 9, 7)]
)
def test_draft_tokens_leave_room_for_the_token_that_every_round_gains(generated: int, k: int, limit: int) -> None:
    sequence = make_sequence(max_tokens=8, k=k)
    sequence.commit([0] * generated)
    assert sequence.max_num_draft_tokens == limit


@pytest.mark.parametrize(("cached", "decoding"), [(0, False), (1, False), (2, True), (3, False)])
def test_a_sequence_decodes_when_the_target_lacks_only_the_last_token(cached: int, decoding: bool) -> None:
    sequence = make_sequence()
    sequence.num_cached_tokens = cached
    assert sequence.is_decoding is decoding


@given(st.lists(st.integers(0, 8).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), max_size=30))
def test_statistics_cover_the_rounds_that_drafted(rounds: list[tuple[int, int]]) -> None:
    stats = SpeculationStats()
    for drafted, accepted in rounds:
        stats.add(drafted, accepted)
    counted = [(drafted, accepted) for drafted, accepted in rounds if drafted]
    total = sum(accepted for _, accepted in counted)
    assert stats.rounds == len(counted)
    assert stats.draft_tokens == sum(drafted for drafted, _ in counted)
    assert stats.accepted_tokens == total
    assert dict(Counter(accepted for _, accepted in counted)) == {i: n for i, n in enumerate(stats.histogram) if n}
    assert stats.mean_acceptance_length == (1 + total / len(counted) if counted else 0)
    assert stats.draft_acceptance_rate == (total / stats.draft_tokens if counted else 0)
