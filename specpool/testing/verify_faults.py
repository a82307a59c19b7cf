"""Faults of verdicts: what a target worker can say wrongly of the tokens that it chose.

A target that chooses other tokens than its model would is not among them: nobody could tell.
"""

import math
from typing import Any

from specpool.testing.fakes import VOCAB_SIZE
from specpool.testing.faults import Answer, Table, entry

VERDICTS: Table = {}


@entry(VERDICTS)
def no_tokens(answer: Answer) -> Any:
    """Gives no token, not even the one that the target adds."""
    for result in answer.response.results:
        del result.token_ids[:]
    return answer.response


@entry(VERDICTS)
def too_many_tokens(answer: Answer) -> Any:
    """Gives k + 2 tokens for k draft tokens."""
    for item, result in answer.pairs:
        missing = len(item.draft_token_ids) + 2 - len(result.token_ids)
        result.token_ids.extend([7] * missing)
    return answer.response


@entry(VERDICTS)
def a_million_tokens(answer: Answer) -> Any:
    """Gives a million tokens."""
    for result in answer.response.results[:1]:
        result.token_ids.extend([7] * 1_000_000)
    return answer.response


@entry(VERDICTS)
def other_tokens_than_drafted(answer: Answer) -> Any:
    """Gives accepted tokens that are not those of the draft."""
    for item, result in answer.pairs:
        if item.draft_token_ids and not item.prefill_only:
            wrong = (item.draft_token_ids[0] + 1) % VOCAB_SIZE
            result.token_ids[:] = [wrong, *(result.token_ids[1:] or [wrong])]
    return answer.response


@entry(VERDICTS)
def tokens_after_the_vocabulary(answer: Answer) -> Any:
    """Chooses the token whose id is the size of the vocabulary."""
    for result in answer.response.results:
        result.token_ids[-1:] = [VOCAB_SIZE] * bool(result.token_ids)
    return answer.response


@entry(VERDICTS)
def huge_tokens(answer: Answer) -> Any:
    """Chooses the token 2^31."""
    for result in answer.response.results:
        result.token_ids[-1:] = [2**31] * bool(result.token_ids)
    return answer.response


@entry(VERDICTS)
def tokens_for_a_prompt_chunk(answer: Answer) -> Any:
    """Chooses a token where only the cache was to be extended."""
    for item, result in answer.pairs:
        if item.prefill_only:
            result.token_ids.append(7)
    return answer.response


@entry(VERDICTS)
def accepted_more_than_cached(answer: Answer) -> Any:
    """Accepts the whole draft, but says that only as much is cached as was accepted before."""
    for item, result in answer.pairs:
        if item.draft_token_ids and len(result.token_ids) <= len(item.draft_token_ids):
            result.token_ids[:] = [*item.draft_token_ids, 7]
    return answer.response


@entry(VERDICTS)
def missing_logprobs(answer: Answer) -> Any:
    """Leaves out the log-probabilities."""
    for result in answer.response.results:
        del result.logprobs[:]
    return answer.response


@entry(VERDICTS)
def too_many_logprobs(answer: Answer) -> Any:
    """Gives one log-probability more than tokens."""
    for result in answer.response.results:
        result.logprobs.add(logprob=-1.0)
    return answer.response


@entry(VERDICTS)
def nan_logprobs(answer: Answer) -> Any:
    """Gives log-probabilities that are no numbers."""
    for result in answer.response.results:
        for found in result.logprobs:
            found.logprob = math.nan
            found.top_logprobs[:] = [math.nan] * len(found.top_logprobs)
    return answer.response


@entry(VERDICTS)
def infinite_logprobs(answer: Answer) -> Any:
    """Gives log-probabilities of plus infinity."""
    for result in answer.response.results:
        for found in result.logprobs:
            found.logprob = math.inf
    return answer.response


@entry(VERDICTS)
def uneven_logprobs(answer: Answer) -> Any:
    """Gives more of the most probable tokens than log-probabilities of them."""
    for result in answer.response.results:
        for found in result.logprobs:
            found.top_token_ids.append(7)
    return answer.response


@entry(VERDICTS)
def unknown_top_tokens(answer: Answer) -> Any:
    """Names tokens outside the vocabulary among the most probable ones."""
    for result in answer.response.results:
        for found in result.logprobs:
            found.top_token_ids[:] = [2**31] * len(found.top_token_ids)
    return answer.response
