"""Which earlier sequence a prompt may begin with a copy of."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.prefixes import BLOCK_TOKENS, FEW, PrefixIndex
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Prefix, Sequence

SHARED = (5,) * (3 * BLOCK_TOKENS)


def make(sequence_id: int, prompt: tuple[int, ...] = SHARED, cached: int = 0) -> Sequence:
    sequence = Sequence(sequence_id, GenerationRequest(str(sequence_id), prompt, 99, frozenset(), 4))
    sequence.target_length = cached
    return sequence


def live(index: PrefixIndex, sequence_id: int, prompt: tuple[int, ...] = SHARED, cached: int = 0) -> Sequence:
    sequence = make(sequence_id, prompt, cached)
    index.add(sequence)
    return sequence


def finished(index: PrefixIndex, sequence_id: int, prompt: tuple[int, ...] = SHARED, cached: int = 0) -> Sequence:
    sequence = live(index, sequence_id, prompt, cached)
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
        assert found.length == shared(found.source.request.prompt_ids)
        assert found.length // BLOCK_TOKENS == most > 0


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
    sequence.target_length = len(sequence.token_ids) - 1
    index.finish(sequence)
    assert index.find(make(9, (*SHARED, *answer, 7, 8))) == Prefix(sequence, len(SHARED) + 40)


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
    assert (index._by_block, index._blocks, index._entered) == ({}, {}, {})


def test_two_never_wait_for_each_other_nor_one_for_itself() -> None:
    index = PrefixIndex()
    one, other = live(index, 7), live(index, 3)
    assert index.find(one) is None
    assert index.find(other) == Prefix(one, len(SHARED) - 1)


def test_a_search_again_finds_what_is_shared_though_it_is_itself_the_longest() -> None:
    index = PrefixIndex()
    first = live(index, 1, (*SHARED, *(1,) * BLOCK_TOKENS))
    second = live(index, 2, (*SHARED, *(2,) * BLOCK_TOKENS))
    assert index.find(second) == Prefix(first, len(SHARED))


def test_blocks_of_equal_hash_are_not_taken_for_equal() -> None:
    index = PrefixIndex()
    with mock.patch("coordinator.scheduling.prefixes._blocks", lambda tokens: [1] * (len(tokens) // BLOCK_TOKENS)):
        live(index, 1, (1,) * 40)
        assert source_of(index, (2,) * 40) is None
        finished(index, 2, (3,) * 80, cached=80)
        index.trim(0)  # a block that was counted twice is forgotten once
        assert source_of(index, (1,) * 40) is not None


@pytest.mark.parametrize("number", [1, 2000])
def test_a_search_looks_at_few(number: int) -> None:
    index = PrefixIndex()
    for i in range(number):
        live(index, i, (*SHARED, i))
    with mock.patch("coordinator.scheduling.prefixes._promise", side_effect=lambda s, _: s.sequence_id) as looked:
        assert source_of(index) is not None
    assert looked.call_count <= 2 * FEW
