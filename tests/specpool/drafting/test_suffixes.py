"""The suffix index against a naive search."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.drafting.plans import NO_LOOKUP, DraftMethod
from specpool.drafting.sequence_source import SequenceSource
from specpool.drafting.suffixes import MAX_PAIRS, MAX_SINGLES, MEMORY_TOKENS, TOKENS_PER_CALL, SuffixIndex
from specpool.drafting.votes import MAX_MATCH


def naive(token_ids: list[int], k: int) -> list[tuple[int, list[int]]]:
    """Find the last tokens by brute force, longest match first, then latest. Matches may overlap the last tokens.

    Only the latest `MAX_SINGLES` occurrences of the last token and `MAX_PAIRS` of the last pair count.
    """
    found = list[tuple[int, list[int]]]()
    num_pairs = num_singles = 0
    for end in range(len(token_ids) - 1, 0, -1):
        length = 0
        while length < min(end, MAX_MATCH) and token_ids[end - 1 - length] == token_ids[-1 - length]:
            length += 1
        text = list(token_ids)
        for i in range(k):
            text.append(text[end + i])
        num_pairs, num_singles = num_pairs + (length > 1), num_singles + (length > 0)
        if num_pairs <= MAX_PAIRS if length > 1 else length and num_singles <= MAX_SINGLES:
            found.append((length, text[len(token_ids) :]))
    return sorted(found, key=lambda match: -match[0])


def matches(index: SuffixIndex, token_ids: list[int], k: int) -> list[tuple[int, list[int]]]:
    return [(length, list(following)) for length, following in index.matches(token_ids, k)]


@given(
    token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 8)),
    k=st.integers(1, 9),
)
def test_matches_equal_those_of_a_naive_search(token_ids: list[int], cuts: list[int], k: int) -> None:
    index, known = SuffixIndex(), 0
    for size in [*cuts, 60]:
        known = min(len(token_ids), known + size)
        assert matches(index, token_ids[:known], k) == naive(token_ids[:known], k)


class Counted(list[int]):
    """A list that counts item reads."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1 if isinstance(index, int) else len(range(*index.indices(len(self))))
        return super().__getitem__(index)


def distinct(count: int) -> list[int]:
    """Return a prompt of distinct tokens above 99."""
    return [100 + (i // 2 if i % 2 else i + count) for i in range(count)]


def test_long_prompts_are_indexed_over_many_calls() -> None:
    """Each call reads a bounded number of tokens, and finds only indexed occurrences."""
    prompt = Counted([*distinct(20 * TOKENS_PER_CALL), 1, 2, 3, 4, 5, 6])
    prompt += [*distinct(TOKENS_PER_CALL), 1, 2, 3, 4]
    index = SuffixIndex()
    for call in range(22):
        before = prompt.reads
        found = matches(index, prompt, 2)
        assert prompt.reads - before < 3 * TOKENS_PER_CALL
        assert found == ([] if call < 20 else [(4, [5, 6])])


def test_long_prompts_are_indexed_during_prefill() -> None:
    prompt = (*range(10, 10 + 3 * TOKENS_PER_CALL), 1, 2, 3, 4, 5, 1, 2, 3)
    sequence = Sequence(0, GenerationRequest("r", prompt, 99, frozenset(), 4, method=DraftMethod.NGRAM))
    source = SequenceSource()
    for _ in range(4):
        assert source.propose(sequence, 2) == NO_LOOKUP
        sequence.target.commit(sequence.target.num_cached_tokens + TOKENS_PER_CALL)
    sequence.target.commit(len(prompt) - 1)
    found = source.propose(sequence, 2)
    assert (found.token_ids, found.run, found.start) == ((4, 5), 3, len(prompt))


def test_old_occurrences_are_dropped_to_bound_memory() -> None:
    ids = distinct(5 * MEMORY_TOKENS)
    recent, old = ids[-MEMORY_TOKENS // 2 :][:4], ids[100:104]
    index = SuffixIndex()
    for _ in range(len(ids) // TOKENS_PER_CALL + 1):
        index.extend(ids)
    assert matches(index, [*ids, *recent], 1)[0][0] == 4
    assert matches(index, [*ids, *recent, *old], 1) == []
    assert len(index._last) + len(index._old) <= 4 * MEMORY_TOKENS, "a token and a pair at each position"


def test_repetitive_text_has_bounded_cost() -> None:
    for text in ([1], [1, 2], [1, 2, 3] * 20 + [4]):
        prompt, index = Counted(text * (100_000 // len(text))), SuffixIndex()
        for _ in range(len(prompt) // TOKENS_PER_CALL + 1):
            index.extend(prompt)
        before = prompt.reads
        assert len(matches(index, prompt, 32)) <= MAX_PAIRS + MAX_SINGLES
        assert prompt.reads - before < 3 * MAX_MATCH * (MAX_PAIRS + MAX_SINGLES)
