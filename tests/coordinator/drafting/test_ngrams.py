"""Prompt lookup against a search that is too simple to be wrong."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.drafting.ngrams import LONGEST_RUN, SHORTEST_RUN, NgramIndex


def reference(token_ids: list[int], k: int) -> tuple[tuple[int, ...], int]:
    for length in range(LONGEST_RUN, SHORTEST_RUN - 1, -1):
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
