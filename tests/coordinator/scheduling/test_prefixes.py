"""Which earlier sequence a prompt may begin with a copy of."""

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.prefixes import BLOCK_TOKENS, MAX_CANDIDATES, PrefixIndex, _digests
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Prefix, Sequence

SHARED = (5,) * (3 * BLOCK_TOKENS)


def make(sequence_id: int, prompt: tuple[int, ...] = SHARED, cached: int = 0, **fields: Any) -> Sequence:
    sequence = Sequence(sequence_id, GenerationRequest(str(sequence_id), prompt, 99, frozenset(), 4, **fields))
    sequence.num_cached_tokens = cached
    return sequence


def live(
    index: PrefixIndex, sequence_id: int, prompt: tuple[int, ...] = SHARED, cached: int = 0, **fields: Any
) -> Sequence:
    sequence = make(sequence_id, prompt, cached, **fields)
    index.add(sequence)
    return sequence


def finished(
    index: PrefixIndex, sequence_id: int, prompt: tuple[int, ...] = SHARED, cached: int = 0, **fields: Any
) -> Sequence:
    sequence = live(index, sequence_id, prompt, cached, **fields)
    sequence.finish = Finish(FinishReason.LENGTH)
    index.finish(sequence)
    return sequence


def source_of(index: PrefixIndex, prompt: tuple[int, ...] = (*SHARED, 1)) -> Sequence | None:
    found = index.find(make(999, prompt))
    return found and found.source


@given(
    prompts=st.lists(
        st.lists(st.integers(0, 1), max_size=80).map(lambda bits: tuple(b for bit in bits for b in [bit] * 8))
    ),
    wanted=st.lists(st.integers(0, 1), min_size=1, max_size=80).map(
        lambda bits: tuple(b for bit in bits for b in [bit] * 8)
    ),
)
def test_what_is_found_is_shared_and_no_other_shares_a_block_more(
    prompts: list[tuple[int, ...]], wanted: tuple[int, ...]
) -> None:
    index = PrefixIndex()
    for i, prompt in enumerate(filter(None, prompts)):
        live(index, i, prompt)

    def shared(prompt: tuple[int, ...]) -> int:
        pairs = zip(prompt, wanted[:-1], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(wanted) - 1))

    found = index.find(make(999, wanted))
    most = max((shared(prompt) // BLOCK_TOKENS for prompt in prompts), default=0)
    if found is None:
        assert most == 0
    else:
        assert found.length <= shared(found.source.request.prompt_ids)
        assert found.length == most * BLOCK_TOKENS > 0


def test_of_equal_sources_one_that_has_it_is_better_than_one_that_will() -> None:
    index = PrefixIndex()
    live(index, 1)
    has_it = live(index, 2, cached=len(SHARED))
    live(index, 3)
    assert source_of(index) is has_it


def test_one_that_lives_is_better_than_one_that_was() -> None:
    index = PrefixIndex()
    lives = live(index, 1, cached=len(SHARED))
    finished(index, 2, cached=len(SHARED))
    assert source_of(index) is lives


def test_of_those_that_will_the_first_and_of_those_that_were_the_last() -> None:
    index = PrefixIndex()
    first = live(index, 1)
    live(index, 2)
    assert source_of(index) is first
    index = PrefixIndex()
    finished(index, 1, cached=len(SHARED))
    last = finished(index, 2, cached=len(SHARED))
    assert source_of(index) is last


def test_a_finished_sequence_can_be_continued_as_far_as_it_was_cached() -> None:
    index = PrefixIndex()
    sequence = live(index, 1, cached=0)
    answer = list(range(100, 140))
    sequence.commit(answer)
    sequence.num_cached_tokens = len(sequence.token_ids) - 1
    index.finish(sequence)
    assert index.find(make(9, (*SHARED, *answer, 7, 8))) == Prefix(sequence, len(SHARED) + 32)


def test_one_that_was_given_up_before_it_was_cached_hides_nothing() -> None:
    index = PrefixIndex()
    cached = finished(index, 1, cached=len(SHARED))
    finished(index, 2, (*SHARED, *SHARED), cached=0)
    assert source_of(index, (*SHARED, *SHARED, 1)) is cached


def test_only_so_many_finished_ones_are_remembered_those_used_last() -> None:
    index = PrefixIndex()
    others = [(i,) * 2 * BLOCK_TOKENS for i in range(3)]
    sequences = [finished(index, i, prompt, cached=2 * BLOCK_TOKENS) for i, prompt in enumerate(others)]
    assert source_of(index, (*others[0], 9)) is sequences[0]
    index.trim(2)
    assert [source_of(index, (*prompt, 9)) for prompt in others] == [sequences[0], None, sequences[2]]
    index.trim(0)
    assert (index._by_digest, index._entries, len(index)) == ({}, {}, 0)


def test_two_never_wait_for_each_other_nor_one_for_itself() -> None:
    index = PrefixIndex()
    one, other = live(index, 7), live(index, 3)
    assert index.find(one) is None
    assert index.find(other) == Prefix(one, len(SHARED) - BLOCK_TOKENS)


def test_a_search_again_finds_what_is_shared_though_it_is_itself_the_longest() -> None:
    index = PrefixIndex()
    first = live(index, 1, (*SHARED, *(1,) * BLOCK_TOKENS))
    second = live(index, 2, (*SHARED, *(2,) * BLOCK_TOKENS))
    assert index.find(second) == Prefix(first, len(SHARED))


@pytest.mark.parametrize("number", [1, 2000])
def test_a_search_looks_at_few(number: int) -> None:
    index = PrefixIndex()
    for i in range(number):
        live(index, i, (*SHARED, i))
    with mock.patch("coordinator.scheduling.prefixes._preference", side_effect=lambda _, s: s.sequence_id) as looked:
        assert source_of(index) is not None
    assert looked.call_count <= 2 * MAX_CANDIDATES


# --- What others can learn


@pytest.mark.parametrize("other", [{"client": "eve"}, {"cache_salt": "hers"}, {"client": "", "cache_salt": "alice"}])
def test_nothing_is_shared_with_another_client_or_salt(other: dict[str, str]) -> None:
    index = PrefixIndex()
    finished(index, 1, cached=len(SHARED), client="alice")
    live(index, 2, cached=len(SHARED), client="alice")
    assert index.find(make(9, (*SHARED, 1), **other)) is None
    assert index.find(make(9, (*SHARED, 1), client="alice")) is not None


@pytest.mark.parametrize("guessed", range(2 * BLOCK_TOKENS + 1))
def test_a_guess_is_confirmed_by_whole_blocks_only(guessed: int) -> None:
    """A prompt that goes on with a secret, and one that guesses the first tokens of it."""
    index, secret = PrefixIndex(), tuple(range(100, 100 + 2 * BLOCK_TOKENS))
    finished(index, 1, (*SHARED, *secret), cached=len(SHARED) + len(secret))
    found = index.find(make(9, (*SHARED, *secret[:guessed], *(7,) * 40)))
    assert found is not None
    assert found.length == len(SHARED) + guessed // BLOCK_TOKENS * BLOCK_TOKENS


def test_samples_of_one_request_share_their_whole_prompt() -> None:
    index, prompt = PrefixIndex(), (*SHARED, 1, 2, 3)
    request = GenerationRequest("r", prompt, 99, frozenset(), 4, n=2)
    first, second = (Sequence(i, sample) for i, sample in enumerate(request.samples(), start=1))
    second.first_sample_id = first.sequence_id
    index.add(first)
    live(index, 7, prompt, cached=len(prompt))
    first.num_cached_tokens = len(prompt)
    assert index.find(second) == Prefix(first, len(prompt) - 1)


def test_samples_that_were_set_aside_share_nothing_that_they_have_generated() -> None:
    index, prompt = PrefixIndex(), (*SHARED, 1, 2, 3)
    request = GenerationRequest("r", prompt, 99, frozenset(), 4, n=2)
    first, second = (Sequence(i, sample) for i, sample in enumerate(request.samples(), start=1))
    second.first_sample_id = first.sequence_id
    first.token_ids += [10, 11, 12, 13]
    second.token_ids += [20, 21, 22, 23]
    index.add(first)
    first.num_cached_tokens = len(first.token_ids) - 1
    assert index.find(second) == Prefix(first, len(prompt))


# --- Long prompts


def test_a_long_prompt_has_few_marks_and_shares_nearly_all() -> None:
    prompt = tuple(range(131_072))
    assert len(list(_digests(prompt))) < 300
    index = PrefixIndex()
    live(index, 1, (*prompt[:100_000], *(0,) * 31_072))
    found = index.find(make(9, prompt))
    assert found is not None
    assert found.length == 100_000


def test_a_search_of_a_long_prompt_compares_no_more_than_the_last_stretch() -> None:
    """The rest is known by its marks, so that a search does not hold up the event loop."""
    prompt, compared = tuple(range(131_072)), []

    class Counting(list[int]):
        def __getitem__(self, at: Any) -> Any:
            compared.append(at)
            return list.__getitem__(self, at)

    index = PrefixIndex()
    for i in range(100):
        source = live(index, i, (*prompt, i))
        source.token_ids = Counting(source.token_ids)
    assert index.find(make(999, prompt)) is not None
    assert len(compared) <= 2 * MAX_CANDIDATES * 131_072 // 32 // BLOCK_TOKENS


def test_what_is_kept_is_bounded_by_the_sequences_that_are_known() -> None:
    index = PrefixIndex()
    for i in range(500):
        finished(index, i, (i, *SHARED * 20), cached=20 * len(SHARED), client=str(i % 50))
        index.trim(8)
    assert len(index) == 8
    assert sum(map(len, index._by_digest.values())) <= 8 * 60
