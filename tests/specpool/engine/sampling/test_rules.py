"""Rules of a sequence change the same logits whether its tokens are counted at once or as it grows."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpool.engine.sampling.rules import SequenceRules, TokenCounts
from specpool.engine.sampling.sampler import changed
from specpool.protocol.sampling import SamplingParams

VOCAB = 30


def adjust_plainly(logits: torch.Tensor, params: SamplingParams, context: Sequence[int]) -> torch.Tensor:
    """The definition: bias, minimum length, then penalties over the whole context."""
    logits, generated = logits.clone(), context[params.prompt_length :]
    for token, bias in params.logit_bias:
        logits[token] += bias
    if len(generated) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -math.inf
    seen = torch.tensor(context).unique()
    values = logits[seen]
    logits[seen] = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    if generated:
        ids, counts = torch.tensor(generated).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


params_of = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.1, 0.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.1]),
    presence_penalty=st.sampled_from([0.0, 1.3]),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.sampled_from([(), (3,), (3, 9)]),
    logit_bias=st.sampled_from([(), ((3, 0.1),), ((0, -100.0), (VOCAB - 1, 100.0))]),
    prompt_length=st.integers(0, 8),
)


@settings(max_examples=150)
@given(params=params_of, context=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_changes_match_the_definition_bit_for_bit(params: SamplingParams, context: list[int], seed: int) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    assert torch.equal(
        changed(logits, params, *SequenceRules(params).changes(context, 1)), adjust_plainly(logits, params, context)
    )


@settings(max_examples=100)
@given(params=params_of, seed=st.integers(0, 10_000))
def test_rounds_with_rejected_drafts_match_rules_that_count_everything(params: SamplingParams, seed: int) -> None:
    """A worker may also be told to keep fewer positions than it has committed."""
    numbers, kept, tokens = random.Random(seed), SequenceRules(params), list[int]()
    for _ in range(8):
        base = numbers.randint(max(0, len(tokens) - numbers.choice([2, 2, 2, 30])), len(tokens))
        kept.truncate(base)
        tokens[base:] = [numbers.randrange(VOCAB) for _ in range(numbers.randint(1, 8))]
        count = numbers.randint(0, min(4, len(tokens)))
        logits, first = torch.randn(VOCAB), len(tokens) - count + 1
        changes = kept.changes(tokens, count)
        assert len(changes) == count
        for length, change in enumerate(changes, first):
            (expected,) = SequenceRules(params).changes(tokens[:length], 1)
            assert (change is None) == (expected is None)
            assert torch.equal(changed(logits, params, change), changed(logits, params, expected))


def test_many_distinct_tokens_are_counted() -> None:
    counts, tokens = TokenCounts(prompt_length=0), [*range(500), *range(500)]
    ids, (row,) = counts.rows(tokens, 1)
    assert dict(zip(ids.tolist(), row.tolist(), strict=True)) == dict.fromkeys(range(500), 2)
    counts.truncate(500)
    ids, rows = counts.rows(tokens[:502], 3)
    assert [dict(zip(ids.tolist(), row.tolist(), strict=True))[1] for row in rows] == [1, 1, 2]


@pytest.mark.parametrize("penalty", [{}, {"repetition_penalty": 1.5}])
def test_a_row_is_not_counted_again_from_the_start(penalty: dict[str, float]) -> None:
    """Only new tokens are read, so a long context costs no more than a short one."""

    class Tokens(list[int]):
        read = 0

        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            found = super().__getitem__(index)  # type: ignore[index]
            Tokens.read += len(found) if isinstance(found, list) else 1
            return found

    rules, tokens = SequenceRules(SamplingParams(1.0, **penalty)), Tokens(np.arange(5000).tolist())
    rules.changes(tokens, 1)
    Tokens.read = 0
    tokens += [1, 2, 3]
    rules.changes(tokens, 3)
    assert Tokens.read <= 6
