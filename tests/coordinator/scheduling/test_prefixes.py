"""The prefix index: which earlier sequence a prompt may copy from."""

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.prefixes import MAX_CANDIDATES, PrefixIndex
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Prefix, Sequence
from specpool.drafting.prefix_digests import BLOCK_TOKENS, PrefixDigests

SHARED = (5,) * (3 * BLOCK_TOKENS)


def make(sequence_id: int, prompt: tuple[int, ...] = SHARED, cached: int = 0, **fields: Any) -> Sequence:
    sequence = Sequence(sequence_id, GenerationRequest(str(sequence_id), prompt, 99, frozenset(), 4, **fields))
    sequence.target.commit(cached)
    return sequence


def running(index: PrefixIndex, *args: Any, **fields: Any) -> Sequence:
    sequence = make(*args, **fields)
    index.add(sequence)
    return sequence


def finished(index: PrefixIndex, *args: Any, **fields: Any) -> Sequence:
    sequence = running(index, *args, **fields)
    sequence.finish = Finish(FinishReason.LENGTH)
    index.finish(sequence)
    return sequence


def source_of(index: PrefixIndex, prompt: tuple[int, ...] = (*SHARED, 1)) -> Sequence | None:
    found = index.find(make(999, prompt))
    return found and found.source


prompts_of_runs = st.lists(st.integers(0, 1), min_size=1, max_size=80).map(
    lambda bits: tuple(b for bit in bits for b in [bit] * 8)
)


@given(prompts=st.lists(prompts_of_runs), prompt=prompts_of_runs)
def test_longest_shared_prefix_is_found(prompts: list[tuple[int, ...]], prompt: tuple[int, ...]) -> None:
    index = PrefixIndex()
    for i, other in enumerate(prompts):
        running(index, i, other)

    def shared(other: tuple[int, ...]) -> int:
        pairs = zip(other, prompt[:-1], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(other), len(prompt) - 1))

    found = index.find(make(999, prompt))
    blocks = max((shared(other) // BLOCK_TOKENS for other in prompts), default=0)
    if found is None:
        assert blocks == 0
    else:
        assert found.length <= shared(found.source.request.prompt_ids)
        assert found.length == blocks * BLOCK_TOKENS > 0


def test_order_of_preference_among_sources() -> None:
    index = PrefixIndex()
    first = running(index, 1)
    running(index, 2)
    assert source_of(index) is first, "of running sources the earliest"
    finished(index, 3, cached=len(SHARED))
    last = finished(index, 4, cached=len(SHARED))
    assert source_of(index) is last, "cached before uncached, and of finished sources the latest"
    cached = running(index, 5, cached=len(SHARED))
    assert source_of(index) is cached, "running before finished"


def test_finished_sequences_share_their_cached_tokens_only() -> None:
    index = PrefixIndex()
    sequence, answer = running(index, 1), list(range(100, 140))
    sequence.commit(answer)
    sequence.target.commit(len(sequence.token_ids) - 1)
    index.finish(sequence)
    finished(index, 2, (*SHARED, *SHARED), cached=0)  # aborted before its prefill
    assert index.find(make(9, (*SHARED, *answer, 7, 8))) == Prefix(sequence, len(SHARED) + 32)
    assert source_of(index, (*SHARED, *SHARED, 1)) is sequence


def test_the_least_recently_used_finished_sequences_are_dropped() -> None:
    index = PrefixIndex()
    prompts = [(i,) * 2 * BLOCK_TOKENS for i in range(3)]
    sequences = [finished(index, i, prompt, cached=2 * BLOCK_TOKENS) for i, prompt in enumerate(prompts)]
    assert source_of(index, (*prompts[0], 9)) is sequences[0]
    index.trim(2)
    assert [source_of(index, (*prompt, 9)) for prompt in prompts] == [sequences[0], None, sequences[2]]
    index.trim(0)
    assert (index._by_digest, index._entries, len(index)) == ({}, {}, 0)


def test_sequences_never_wait_for_each_other_or_for_themselves() -> None:
    index = PrefixIndex()
    one, other = running(index, 7), running(index, 3)
    assert index.find(one) is None
    assert index.find(other) == Prefix(one, len(SHARED) - BLOCK_TOKENS)
    longer = running(index, 4, (*SHARED, *(1,) * BLOCK_TOKENS))
    assert index.find(longer) == Prefix(other, len(SHARED)), "though it is itself the longest match"


@pytest.mark.parametrize("number", [1, 2000])
def test_a_search_examines_few_candidates(number: int) -> None:
    index = PrefixIndex()
    for i in range(number):
        running(index, i, (*SHARED, i))
    with mock.patch("coordinator.scheduling.prefixes._preference", side_effect=lambda _, s: s.sequence_id) as examined:
        assert source_of(index) is not None
    assert examined.call_count <= 2 * MAX_CANDIDATES


# --- Isolation


@pytest.mark.parametrize("other", [{"client": "eve"}, {"cache_salt": "hers"}, {"client": "", "cache_salt": "alice"}])
def test_nothing_is_shared_across_clients_or_salts(other: dict[str, str]) -> None:
    index = PrefixIndex()
    finished(index, 1, cached=len(SHARED), client="alice")
    running(index, 2, cached=len(SHARED), client="alice")
    assert index.find(make(9, (*SHARED, 1), **other)) is None
    assert index.find(make(9, (*SHARED, 1), client="alice")) is not None


@pytest.mark.parametrize("preempted", [False, True])
def test_samples_share_their_whole_prompt_and_nothing_beyond(preempted: bool) -> None:
    index, prompt = PrefixIndex(), (*SHARED, 1, 2, 3)
    request = GenerationRequest("r", prompt, 99, frozenset(), 4, n=2)
    first, second = (Sequence(i, sample) for i, sample in enumerate(request.samples(), start=1))
    second.first_sample_id = first.sequence_id
    if preempted:
        first.token_ids += [10, 11, 12, 13]
        second.token_ids += [20, 21, 22, 23]
    index.add(first)
    running(index, 7, prompt, cached=len(prompt))
    first.target.commit(len(prompt) + 3 * preempted)
    assert index.find(second) == Prefix(first, len(prompt) if preempted else len(prompt) - 1)


# --- Long prompts


def test_long_prompts_have_few_digests_and_share_nearly_all() -> None:
    prompt = tuple(range(131_072))
    assert len(list(PrefixDigests().up_to(prompt, len(prompt)))) < 300
    index = PrefixIndex()
    running(index, 1, (*prompt[:100_000], *(0,) * 31_072))
    found = index.find(make(9, prompt))
    assert found is not None
    assert found.length == 100_000


def test_a_search_compares_only_the_last_stretch_of_a_long_prompt() -> None:
    """Digests identify the rest, so that a search does not block the event loop."""
    prompt, compared = tuple(range(131_072)), []

    class Counting(list[int]):
        def __getitem__(self, at: Any) -> Any:
            compared.append(at)
            return list.__getitem__(self, at)

    index = PrefixIndex()
    for i in range(20):
        source = running(index, i, (*prompt, i))
        source.token_ids = Counting(source.token_ids)
    assert index.find(make(999, prompt)) is not None
    assert len(compared) <= 2 * MAX_CANDIDATES * 131_072 // 32 // BLOCK_TOKENS


def test_memory_is_bounded_by_the_number_of_sequences() -> None:
    index = PrefixIndex()
    for i in range(500):
        finished(index, i, (i, *SHARED * 20), cached=20 * len(SHARED), client=str(i % 50))
        index.trim(8)
    assert len(index) == 8
    assert sum(map(len, index._by_digest.values())) <= 8 * 60


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3000), st.lists(st.integers(0, 3000), max_size=4))
def test_digests_do_not_depend_on_earlier_calls(token_ids: list[int], lengths: list[int]) -> None:
    digests = PrefixDigests()
    for length in sorted(min(length, len(token_ids)) for length in lengths):
        next(digests.up_to(token_ids[:length], length), None)
        assert [*digests.up_to(token_ids, length)] == [*PrefixDigests().up_to(token_ids, length)]
