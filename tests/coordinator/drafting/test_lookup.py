"""Prompt lookup over the life of a sequence."""

from coordinator.drafting.lookup import PromptLookup
from coordinator.drafting.ngrams import TOKENS_PER_CALL
from coordinator.scheduling.sequence import DraftMethod, GenerationRequest, Sequence


def test_a_long_prompt_is_indexed_while_it_is_prefilled() -> None:
    prompt = (*range(10, 10 + 3 * TOKENS_PER_CALL), 1, 2, 3, 4, 5, 1, 2, 3)
    sequence = Sequence(0, GenerationRequest("r", prompt, 99, frozenset(), 4, method=DraftMethod.NGRAM))
    lookup = PromptLookup()
    for _ in range(4):
        assert lookup.look_up(sequence, 2).token_ids == ()
        sequence.num_cached_tokens += TOKENS_PER_CALL
    sequence.num_cached_tokens = len(prompt) - 1
    assert lookup.look_up(sequence, 2).token_ids == (4, 5)
