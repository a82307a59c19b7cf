"""Prompt lookup against a naive search."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.drafting.ngrams import MAX_RUN, MEMORY_TOKENS, TOKENS_PER_CALL, NgramIndex
from specpool.drafting.plans import NO_LOOKUP, DraftMethod
from specpool.drafting.sequence_source import SequenceSource


def reference(token_ids: list[int], k: int) -> tuple[tuple[int, ...], int]:
    for length in range(MAX_RUN, 0, -1):
        run = token_ids[-length:]
        for end in range(len(token_ids) - 1, length - 1, -1):
            if len(run) == length and token_ids[end - length : end] == run:
                proposed = list(token_ids)
                for i in range(k):
                    proposed.append(proposed[end + i])
                return tuple(proposed[len(token_ids) :]), length if k else 0
    return (), 0


@given(token_ids=st.lists(st.integers(0, 3), max_size=60), cuts=st.lists(st.integers(1, 8)), k=st.integers(0, 9))
def test_the_proposal_follows_the_last_occurrence_of_the_longest_run(
    token_ids: list[int], cuts: list[int], k: int
) -> None:
    index, known = NgramIndex(), 0
    for size in [*cuts, 60]:
        known = min(len(token_ids), known + size)
        assert index.propose(token_ids[:known], k) == reference(token_ids[:known], k)


class Counted(list[int]):
    """A list that counts the items read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1 if isinstance(index, int) else len(range(*index.indices(len(self))))
        return super().__getitem__(index)


def distinct(count: int) -> list[int]:
    """A prompt without repeated tokens, all of them above 99."""
    return [100 + (i // 2 if i % 2 else i + count) for i in range(count)]


def test_long_prompts_are_indexed_over_many_calls() -> None:
    """Each call reads a bounded number of tokens, and finds only indexed ones."""
    prompt = Counted([*distinct(20 * TOKENS_PER_CALL), 1, 2, 3, 4, 5, 6])
    prompt += [*distinct(TOKENS_PER_CALL), 1, 2, 3, 4]
    index = NgramIndex()
    for call in range(22):
        before = prompt.reads
        proposed = index.propose(prompt, 2)
        assert prompt.reads - before < 3 * TOKENS_PER_CALL
        assert proposed == (((), 0) if call < 20 else ((5, 6), 4))


def test_long_prompts_are_indexed_while_they_are_prefilled() -> None:
    prompt = (*range(10, 10 + 3 * TOKENS_PER_CALL), 1, 2, 3, 4, 5, 1, 2, 3)
    sequence = Sequence(0, GenerationRequest("r", prompt, 99, frozenset(), 4, method=DraftMethod.NGRAM))
    source = SequenceSource()
    for _ in range(4):
        assert source.propose(sequence, 2) == NO_LOOKUP
        sequence.target.commit(sequence.target.num_cached_tokens + TOKENS_PER_CALL)
    sequence.target.commit(len(prompt) - 1)
    found = source.propose(sequence, 2)
    assert (found.token_ids, found.run, found.start) == ((4, 5), 3, len(prompt))


def test_old_runs_are_dropped_to_bound_the_memory() -> None:
    ids = distinct(5 * MEMORY_TOKENS)
    recent, old = ids[-MEMORY_TOKENS // 2 :][:4], ids[100:104]
    index = NgramIndex()
    for _ in range(len(ids) // TOKENS_PER_CALL + 1):
        index.extend(ids)
    assert index.propose([*ids, *recent], 1)[1] == 4
    assert index.propose([*ids, *recent, *old], 1) == ((), 0)
    assert len(index._last) + len(index._old) <= 4 * MEMORY_TOKENS, "a token and a pair at each position"


def test_frequent_pairs_have_bounded_cost() -> None:
    prompt, index = Counted([1, 2] * 50_000), NgramIndex()
    for _ in range(len(prompt) // TOKENS_PER_CALL + 1):
        index.extend(prompt)
    prompt += [9, 1, 2]  # no longer run repeats
    before = prompt.reads
    assert index.propose(prompt, 1) == ((9,), 2)
    assert prompt.reads - before < 500
