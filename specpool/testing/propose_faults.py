"""Faults of proposals: what a draft worker can say wrongly of its drafts."""

import math
from collections.abc import Callable
from typing import Any

from specpool.testing.fakes import VOCAB_SIZE
from specpool.testing.faults import Answer, Table, entry

PROPOSALS: Table = {}


def _with_confidences(answer: Answer, confidences: Callable[[int], list[float]]) -> Any:
    """Replaces the confidences; `confidences`: by the number of draft tokens."""
    for result in answer.response.results:
        result.confidences[:] = confidences(len(result.draft_token_ids))
    return answer.response


@entry(PROPOSALS)
def nan_confidences(answer: Answer) -> Any:
    """Gives confidences that are no numbers."""
    return _with_confidences(answer, lambda drafted: [math.nan] * drafted)


@entry(PROPOSALS)
def infinite_confidences(answer: Answer) -> Any:
    """Gives confidences of plus infinity."""
    return _with_confidences(answer, lambda drafted: [math.inf] * drafted)


@entry(PROPOSALS)
def minus_infinite_confidences(answer: Answer) -> Any:
    """Gives confidences of minus infinity."""
    return _with_confidences(answer, lambda drafted: [-math.inf] * drafted)


@entry(PROPOSALS)
def negative_confidences(answer: Answer) -> Any:
    """Gives confidences below 0."""
    return _with_confidences(answer, lambda drafted: [-0.5] * drafted)


@entry(PROPOSALS)
def confidences_above_one(answer: Answer) -> Any:
    """Gives confidences above 1."""
    return _with_confidences(answer, lambda drafted: [1e30] * drafted)


@entry(PROPOSALS)
def no_confidences(answer: Answer) -> Any:
    """Leaves out the confidences."""
    return _with_confidences(answer, lambda drafted: [])


@entry(PROPOSALS)
def too_few_confidences(answer: Answer) -> Any:
    """Leaves out the last confidence."""
    return _with_confidences(answer, lambda drafted: [0.9] * max(0, drafted - 1))


@entry(PROPOSALS)
def too_many_confidences(answer: Answer) -> Any:
    """Gives more confidences than tokens."""
    return _with_confidences(answer, lambda drafted: [0.9] * (drafted + 100))


@entry(PROPOSALS)
def no_draft_tokens(answer: Answer) -> Any:
    """Drafts nothing."""
    for result in answer.response.results:
        del result.draft_token_ids[:], result.confidences[:]
    return answer.response


@entry(PROPOSALS)
def more_draft_tokens_than_asked(answer: Answer) -> Any:
    """Drafts one token more than was asked for."""
    for item, result in answer.pairs:
        result.draft_token_ids[:] = [7] * (item.num_draft_tokens + 1)
    return answer.response


@entry(PROPOSALS)
def a_million_draft_tokens(answer: Answer) -> Any:
    """Drafts a million tokens."""
    for result in answer.response.results[:1]:
        result.draft_token_ids.extend([7] * 1_000_000)
    return answer.response


@entry(PROPOSALS)
def draft_tokens_after_the_vocabulary(answer: Answer) -> Any:
    """Drafts the token whose id is the size of the vocabulary."""
    for result in answer.response.results:
        result.draft_token_ids[:] = [VOCAB_SIZE] * len(result.draft_token_ids)
    return answer.response


@entry(PROPOSALS)
def huge_draft_tokens(answer: Answer) -> Any:
    """Drafts the token 2^31."""
    for result in answer.response.results:
        result.draft_token_ids[:] = [2**31] * len(result.draft_token_ids)
    return answer.response


@entry(PROPOSALS)
def wrong_draft_tokens(answer: Answer) -> Any:
    """Drafts tokens that the target never chooses, and is sure of them."""
    for result in answer.response.results:
        result.draft_token_ids[:] = [(token + 1) % VOCAB_SIZE for token in result.draft_token_ids]
    return _with_confidences(answer, lambda drafted: [1.0] * drafted)
