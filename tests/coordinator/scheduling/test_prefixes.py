"""The mirror of the target's prefix cache: pages that a prompt finds there, now or soon."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.prefixes import PrefixIndex
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence

PAGE_SIZE = 16
SHARED = (5,) * (3 * PAGE_SIZE)


def make(sequence_id: int, prompt: tuple[int, ...] = SHARED, **fields: Any) -> Sequence:
    return Sequence(sequence_id, GenerationRequest(str(sequence_id), prompt, 99, frozenset(), 4, **fields))


def running(index: PrefixIndex, *args: Any, cached: int = 0, **fields: Any) -> Sequence:
    sequence = make(*args, **fields)
    index.add(sequence)
    commit(index, sequence, cached)
    return sequence


def commit(index: PrefixIndex, sequence: Sequence, cached: int) -> None:
    sequence.target.commit(cached)
    index.commit(sequence)


def found(index: PrefixIndex, prompt: tuple[int, ...] = (*SHARED, 1), **fields: Any) -> tuple[int, int]:
    """Tokens of a prompt that are cached, and those that are cached now or soon."""
    sequence = make(999, prompt, **fields)
    return index.cached_length(sequence), index.matched_length(sequence)


prompts_of_runs = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(
    lambda bits: tuple(b for bit in bits for b in [bit] * 8)
)


@given(prompts=st.lists(st.tuples(prompts_of_runs, st.integers(0, 96))), prompt=prompts_of_runs)
def test_the_longest_shared_prefix_is_found(
    prompts: list[tuple[tuple[int, ...], int]], prompt: tuple[int, ...]
) -> None:
    index = PrefixIndex(PAGE_SIZE)
    for i, (other, cached) in enumerate(prompts):
        running(index, i, other, cached=min(cached, len(other)))
    index.check_integrity(set(range(len(prompts))))

    def longest(lengths: list[int]) -> int:
        shared = (
            sum(prompt[:end] == other[:end] for end in range(PAGE_SIZE, min(length, len(prompt) - 1) + 1, PAGE_SIZE))
            for (other, _), length in zip(prompts, lengths, strict=True)
        )
        return PAGE_SIZE * max(shared, default=0)

    cached = [min(cached, len(other)) for other, cached in prompts]
    assert found(index, prompt) == (longest(cached), longest([len(other) for other, _ in prompts]))


def test_pages_stay_when_their_sequence_leaves_and_go_when_the_target_evicts_them() -> None:
    index = PrefixIndex(PAGE_SIZE)
    sequence = running(index, 1, cached=2 * PAGE_SIZE)
    assert found(index) == (32, 48)
    index.discard(sequence)
    assert found(index) == (32, 32)
    index.evict(sequence.page_digests(PAGE_SIZE, 48)[1:])
    assert found(index) == (16, 16)


def test_generated_tokens_are_found_too() -> None:
    index, answer = PrefixIndex(PAGE_SIZE), tuple(range(100, 140))
    sequence = running(index, 1)
    sequence.commit(answer)
    commit(index, sequence, len(SHARED) + 40)
    assert found(index, (*SHARED, *answer, 7, 8)) == (len(SHARED) + 32,) * 2


def test_a_stop_within_the_draft_leaves_no_pages_of_unknown_tokens() -> None:
    index = PrefixIndex(PAGE_SIZE)
    sequence = running(index, 1)
    commit(index, sequence, len(SHARED) + PAGE_SIZE)  # more positions than the sequence has tokens
    assert len(index) == 3


def test_the_last_token_is_always_left_to_run() -> None:
    index = PrefixIndex(PAGE_SIZE)
    running(index, 1, cached=len(SHARED))
    assert found(index, SHARED) == (len(SHARED) - PAGE_SIZE,) * 2


def test_pages_lost_with_a_cache_are_recorded_again() -> None:
    index = PrefixIndex(PAGE_SIZE)
    sequence = running(index, 1, cached=48)
    index.evict(sequence.page_digests(PAGE_SIZE, 48))
    commit(index, sequence, 0)
    commit(index, sequence, 48)
    assert found(index) == (48, 48)


# --- States of recurrent layers


def commit_with_states(index: PrefixIndex, sequence: Sequence, cached: int, reusable: int) -> None:
    sequence.target.commit(cached, reusable)
    index.commit(sequence)


def test_a_prefix_ends_where_the_target_kept_states() -> None:
    index, prompt = PrefixIndex(PAGE_SIZE), tuple(range(6 * PAGE_SIZE))
    sequence = make(1, prompt)
    index.add(sequence)
    commit_with_states(index, sequence, 40, 0)
    assert found(index, prompt) == (0, 80)
    commit_with_states(index, sequence, 64, 32)
    commit_with_states(index, sequence, 96, 80)
    assert found(index, prompt) == (80, 80)
    assert found(index, prompt[:80]) == (32, 64)
    assert found(index, prompt[:32]) == (0, 16)
    index.check_integrity({1})


def test_states_and_pages_are_evicted_one_by_one() -> None:
    index, prompt = PrefixIndex(PAGE_SIZE), tuple(range(3 * PAGE_SIZE))
    sequence = make(1, prompt)
    index.add(sequence)
    commit_with_states(index, sequence, 16, 16)
    commit_with_states(index, sequence, 48, 32)
    last = sequence.page_digests(PAGE_SIZE, 32)[-1:]
    index.evict(last)
    assert found(index, prompt) == (16, 32), "the page may still be cached"
    index.evict(last)
    assert found(index, prompt) == (16, 16)
    index.check_integrity({1})


def test_states_are_wanted_where_a_prompt_leaves_the_path_of_another() -> None:
    index, prompt = PrefixIndex(PAGE_SIZE), tuple(range(4 * PAGE_SIZE))
    sequence = running(index, 1, prompt)
    other, extended = make(2, (*prompt[:40], *SHARED)), make(3, (*prompt, *SHARED))
    commit(index, sequence, 32)
    assert index.fork_length(other) == 0, "sequences can begin after every page"
    commit_with_states(index, sequence, 64, 0)
    assert (index.fork_length(other), index.fork_length(extended)) == (32, 0)
    index.add(other)
    assert index.waits(other) is False
    third = make(4, (*prompt[:32], *SHARED))
    index.add(third)
    assert index.waits(third), "the other sequence runs these pages again, to keep the states after them"
    commit_with_states(index, other, 32, 32)
    assert not index.waits(third)
    assert index.cached_length(third) == 32
    index.check_integrity({1, 2, 4})


@pytest.mark.parametrize("how", ["mispredicted", "clear"])
def test_states_can_be_forgotten_together(how: str) -> None:
    index, prompt = PrefixIndex(PAGE_SIZE), tuple(range(3 * PAGE_SIZE))
    sequence = make(1, prompt)
    index.add(sequence)
    commit_with_states(index, sequence, 48, 32)
    if how == "clear":
        index.clear()
    else:
        index.mispredicted(sequence)
    assert found(index, prompt) == (0, 0 if how == "clear" else 32)


# --- Waiting


def test_a_sequence_waits_for_the_longest_prefix_that_others_prefill() -> None:
    index = PrefixIndex(PAGE_SIZE)
    first, longer = running(index, 1), running(index, 2, (*SHARED, *(1,) * PAGE_SIZE))
    third = running(index, 3, (*SHARED, *(1,) * PAGE_SIZE, 2))
    assert [index.waits(sequence) for sequence in (first, longer, third)] == [False, True, True]
    commit(index, first, 48)
    assert [index.waits(sequence) for sequence in (first, longer, third)] == [False, False, True]
    commit(index, longer, 64)
    assert not index.waits(third)


@pytest.mark.parametrize("end", ["abort", "pause", "leave"])
def test_nobody_waits_for_a_sequence_that_does_not_run(end: str) -> None:
    index = PrefixIndex(PAGE_SIZE)
    first, second, third = (running(index, i) for i in range(3))
    if end == "abort":
        first.finish = Finish(FinishReason.ABORT)
    elif end == "pause":
        first.paused = True
    else:
        index.discard(first)
    assert not index.waits(second)
    for sequence in (second, third):
        index.add(sequence)
    assert (index.waits(second), index.waits(third)) == (False, True)


def test_sequences_never_wait_for_each_other() -> None:
    index = PrefixIndex(PAGE_SIZE)
    first, second = running(index, 1), running(index, 2, (*SHARED, *SHARED))
    index.discard(first)
    third = running(index, 3, (*SHARED, *SHARED))  # prefills the first pages, and the second one the others
    assert index.waits(second)
    assert not index.waits(third)


# --- Isolation


@pytest.mark.parametrize("other", [{"client": "eve"}, {"cache_salt": "hers"}, {"client": "", "cache_salt": "alice"}])
def test_nothing_is_shared_across_clients_or_salts(other: dict[str, str]) -> None:
    index = PrefixIndex(PAGE_SIZE)
    running(index, 1, cached=16, client="alice")
    assert found(index, **other) == (0, 0)
    assert found(index, client="alice") == (16, 48)


def test_without_a_page_size_nothing_is_shared() -> None:
    index = PrefixIndex()
    running(index, 1, cached=48)
    assert found(index) == (0, 0)


# --- Cost


def test_a_search_digests_each_token_once() -> None:
    prompt, read = tuple(range(131_072)), list[int]()

    class Counting(list[int]):
        def __getitem__(self, at: Any) -> Any:
            read.append(len(range(*at.indices(len(self)))))
            return list.__getitem__(self, at)

    index, sequence = PrefixIndex(PAGE_SIZE), make(2, prompt)
    running(index, 1, prompt, cached=131_072)
    sequence.token_ids = Counting(sequence.token_ids)
    for _ in range(3):
        assert index.cached_length(sequence) == index.matched_length(sequence) == 131_072 - PAGE_SIZE
    assert sum(read) == 131_072 - PAGE_SIZE


def test_memory_is_bounded_by_the_pages_of_the_target() -> None:
    index = PrefixIndex(PAGE_SIZE, max_pages=8)
    for i in range(500):
        index.discard(running(index, i, (i, *SHARED), cached=48, client=str(i % 50)))
    assert len(index) == 8
    for i in range(20):
        sequence = make(i, (i, *SHARED))
        index.add(sequence)
        commit_with_states(index, sequence, 48, 48)
        index.discard(sequence)
    index.check_integrity(set())
    assert len(index) == 8
    assert (index._members, index._prefilling) == ({}, {})
