"""Committing verified tokens, and speculation statistics."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence

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


def test_digests_of_pages_depend_on_all_tokens_and_the_namespace() -> None:
    def digests(prompt: tuple[int, ...], page_size: int = 2, **fields: Any) -> list[bytes]:
        sequence = Sequence(1, GenerationRequest("r", prompt, 8, frozenset(), 4, **fields))
        sequence.commit([7, 8, 9])
        return sequence.page_digests(page_size, len(sequence.token_ids))

    assert len(digests((1, 2, 3))) == 3
    assert digests((1, 2, 3))[:1] == digests((1, 2, 4, 5))[:1]
    assert not set(digests((1, 2, 3))) & set(digests((5, 2, 3)))
    assert not set(digests((1, 2, 3))) & set(digests((1, 2, 3), page_size=4))
    names = [{"client": "a"}, {"cache_salt": "a"}, {"client": "a", "cache_salt": "a"}, {}]
    assert len({digests((1, 2, 3), **name)[0] for name in names}) == 4
    assert digests((1, 2, 3), is_background=True) == digests((1, 2, 3), page_size=0) == []
