"""Prompt lookup against a search that is too simple to be wrong."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.drafting.ngrams import MAX_RUN, MEMORY_TOKENS, MIN_RUN, TOKENS_PER_CALL, NgramIndex


def reference(token_ids: list[int], k: int) -> tuple[tuple[int, ...], int]:
    for length in range(MAX_RUN, MIN_RUN - 1, -1):
        run = token_ids[-length:]
        for end in range(len(token_ids) - 1, length - 1, -1):
            if len(run) == length and token_ids[end - length : end] == run:
                follows = list(token_ids)
                for i in range(k):
                    follows.append(follows[end + i])
                return tuple(follows[len(token_ids) :]), length if k else 0
    return (), 0


@given(token_ids=st.lists(st.integers(0, 3), max_size=60), cuts=st.lists(st.integers(1, 8)), k=st.integers(0, 9))
def test_the_proposal_is_what_followed_the_longest_run_when_it_came_last(
    token_ids: list[int], cuts: list[int], k: int
) -> None:
    index, known = NgramIndex(), 0
    for size in [*cuts, 60]:
        known = min(len(token_ids), known + size)
        assert index.propose(token_ids[:known], k) == reference(token_ids[:known], k)


def test_a_loop_goes_on_for_ever() -> None:
    assert NgramIndex().propose([9, 1, 2, 3, 1, 2, 3, 1, 2], 7) == ((3, 1, 2, 3, 1, 2, 3), 4)


def test_nothing_is_made_of_nothing() -> None:
    assert NgramIndex().propose([], 4) == ((), 0)
    assert NgramIndex().propose([5], 4) == ((), 0)
    assert NgramIndex().propose([1, 2, 3, 4], 4) == ((), 0)


class Counted(list[int]):
    """A list that counts the items read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1 if isinstance(index, int) else len(range(*index.indices(len(self))))
        return super().__getitem__(index)


def distinct(count: int) -> list[int]:
    """A prompt in which no pair of tokens comes twice."""
    return [i // 2 if i % 2 else i + count for i in range(count)]


def test_a_long_prompt_is_indexed_over_many_calls() -> None:
    """Each reads a bounded number of tokens, and only those of the index so far are found."""
    prompt = Counted([*distinct(20 * TOKENS_PER_CALL), 1, 2, 3, 4, 5, 6])
    prompt += [*distinct(TOKENS_PER_CALL), 1, 2, 3, 4]
    index = NgramIndex()
    for call in range(22):
        before = prompt.reads
        proposed = index.propose(prompt, 2)
        assert prompt.reads - before < 3 * TOKENS_PER_CALL
        assert proposed == (((), 0) if call < 20 else ((5, 6), 4))


def test_runs_are_indexed_before_they_are_looked_up() -> None:
    prompt = [*distinct(2 * TOKENS_PER_CALL), 1, 2, 3, 4, 5, 1, 2, 3]
    index = NgramIndex()
    index.extend(prompt)
    index.extend(prompt)
    assert index.propose(prompt, 2) == ((4, 5), 3)


def test_old_runs_are_forgotten_so_that_memory_is_bounded() -> None:
    ids = distinct(5 * MEMORY_TOKENS)
    recent, old = ids[-MEMORY_TOKENS // 2 :][:4], ids[100:104]
    index = NgramIndex()
    for _ in range(len(ids) // TOKENS_PER_CALL + 1):
        index.extend(ids)
    assert index.propose([*ids, *recent], 1)[1] == 4
    assert index.propose([*ids, *recent, *old], 1) == ((), 0)
    assert len(index._last) + len(index._old) <= 2 * MEMORY_TOKENS


def test_a_pair_that_comes_all_the_time_costs_no_more() -> None:
    prompt, index = Counted([1, 2] * 50_000), NgramIndex()
    for _ in range(len(prompt) // TOKENS_PER_CALL + 1):
        index.extend(prompt)
    prompt += [9, 1, 2]  # the run of three or four does not come before
    before = prompt.reads
    assert index.propose(prompt, 1) == ((9,), 2)
    assert prompt.reads - before < 500
