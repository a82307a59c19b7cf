"""The sampler draws from the softmax for any draft, and applies penalties and limits as transformers does."""

import math
from collections import Counter
from dataclasses import replace
from operator import eq
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import SequenceRules
from specpool.engine.sampling.sampler import candidates, changed, choose_token, choose_tokens, largest
from specpool.protocol.sampling import SamplingParams

VOCAB = 40
DRAWS = 2_000
# Chi-squared with 39 degrees of freedom.
QUANTILE_99_9 = 72.05


@settings(max_examples=60)
@given(rows=st.integers(1, 4), size=st.integers(1, 300), distinct=st.integers(1, 6), seed=st.integers(0, 99))
def test_largest_equals_torch_argmax(rows: int, size: int, distinct: int, seed: int) -> None:
    """Includes ties, NaN and padded rows."""
    values = torch.tensor([-math.inf, -1.0, 0.0, 2.5, math.inf, math.nan])
    logits = values[torch.randint(distinct, (rows, size), generator=torch.Generator().manual_seed(seed))]
    assert largest(logits).tolist() == logits.argmax(-1).tolist()
    padded = torch.nn.functional.pad(logits, (0, 3), value=math.inf)[:, : logits.shape[1]]
    assert largest(padded).tolist() == logits.argmax(-1).tolist()
    assert largest(logits.bfloat16()).tolist() == logits.argmax(-1).tolist()


def make_logits(seed: int, size: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


# --- Penalties and limits, against transformers


def processors(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """The same rules in transformers, in the same order."""
    rules = LogitsProcessorList()
    if params.logit_bias:
        rules.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    if params.min_tokens and params.stop_token_ids:
        stops = list(params.stop_token_ids)
        rules.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, stops))
    if params.repetition_penalty != 1:
        rules.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    rules.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        rules.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        rules.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        rules.append(TopPLogitsWarper(params.top_p))
    return rules


all_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 3),
    top_k=st.sampled_from([0, 0, 1, 3, 10, VOCAB, 99]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.3, 0.9, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.sampled_from([(), (3,), (3, 7)]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-50, 50, width=32), max_size=3).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
)
contexts = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), st.lists(st.integers(0, VOCAB - 1), max_size=9)
)


@settings(max_examples=150)
@given(params=all_params, context=contexts, seed=st.integers(0, 50), ties=st.booleans(), few=st.integers(1, VOCAB))
def test_rules_match_transformers(
    params: SamplingParams, context: tuple[list[int], list[int]], seed: int, ties: bool, few: int
) -> None:
    """Includes ties, and more candidates than NUCLEUS_CANDIDATES."""
    prompt, generated = context
    tokens = prompt + generated
    logits = make_logits(seed).round() if ties else make_logits(seed)
    params = replace(params, prompt_length=len(prompt))
    expected = processors(params, len(prompt))(torch.tensor([tokens]), logits[None].clone())[0]
    before = logits.clone()
    with mock.patch("specpool.engine.sampling.sampler.NUCLEUS_CANDIDATES", few):
        values, token_ids = candidates(
            changed(logits, params, *SequenceRules(params).changes(tokens, 1)) / params.temperature, params
        )
        assert choose_token(logits, params, tokens) in token_ids
    assert torch.equal(logits, before), "the input has changed"
    actual = torch.full((VOCAB,), -math.inf).index_put((token_ids,), values)
    # A token at the edge of top_p depends on the order of summation and of ties.
    edge = torch.isinf(actual) != torch.isinf(expected)
    assert len(set(torch.maximum(expected, actual)[edge].tolist())) <= (params.top_p < 1)
    assert ties or edge.sum() <= (params.top_p < 1)
    torch.testing.assert_close(actual[~edge], expected[~edge])


@given(frequency=st.sampled_from([-1.0, 0.0, 0.5]), presence=st.sampled_from([-1.0, 0.0, 1.5]), context=contexts)
def test_frequency_and_presence_penalties_count_generated_tokens(
    frequency: float, presence: float, context: tuple[list[int], list[int]]
) -> None:
    prompt, generated = context
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence, prompt_length=len(prompt))
    logits = make_logits(1)
    counts = Counter(generated)
    expected = [
        logits[token].item() - frequency * counts[token] - presence * (counts[token] > 0) for token in range(VOCAB)
    ]
    actual = changed(logits, params, *SequenceRules(params).changes(prompt + generated, 1))
    torch.testing.assert_close(actual, torch.tensor(expected))


@pytest.mark.parametrize("rule", [{"top_p": 0.3}, {"top_k": 3}, {"top_k": 9, "top_p": 0.3}])
def test_ties_with_the_last_kept_token_are_kept(rule: dict[str, float]) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, 2.0])
    _, token_ids = candidates(logits, SamplingParams(temperature=1, **rule))
    assert token_ids.tolist() == [1, 3, 4, 5]


@pytest.mark.parametrize("value", [-math.inf, math.inf])
def test_rows_without_finite_logits_give_token_0(value: float) -> None:
    params = SamplingParams(temperature=1, top_k=2, top_p=0.5, min_p=0.1)
    assert choose_token(torch.full((9,), value), params, [1]) == 0


# --- The distribution


def chi_squared(counts: Counter[int], probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.total()
    observed = torch.tensor([counts[token] for token in range(len(probabilities))], dtype=torch.float64)
    return float(((observed - expected) ** 2 / expected).sum())


def test_samples_at_many_positions_follow_the_softmax() -> None:
    logits, params = make_logits(3, spread=1.0), SamplingParams(temperature=0.8, seed=7)
    drawn = Counter(choose_token(logits, params, range(position)) for position in range(DRAWS))
    assert chi_squared(drawn, (logits / 0.8).softmax(0)) < QUANTILE_99_9


DRAFTS = {
    "good": lambda logits: logits + make_logits(9, spread=0.3),
    "bad": lambda logits: make_logits(8, spread=2.0),
    "adversarial": lambda logits: -logits,
}


def draws(logits: torch.Tensor) -> list[int]:
    """Choices at one position with many seeds."""
    return [choose_token(logits, SamplingParams(temperature=1.0, seed=seed), [0] * 5) for seed in range(DRAWS)]


@pytest.mark.slow
def test_shared_noise_keeps_the_distribution_and_reaches_the_acceptance_bound() -> None:
    """Draft and target must agree at least as often as (1 - TV) / (1 + TV), the bound of Daliri et al."""
    target = make_logits(3, spread=1.0)
    emitted = draws(target)
    assert chi_squared(Counter(emitted), target.softmax(0)) < QUANTILE_99_9
    for draft in DRAFTS.values():
        proposed = draft(target)
        accepted = sum(map(eq, draws(proposed), emitted))
        distance = float((target.softmax(0) - proposed.softmax(0)).abs().sum() / 2)
        bound = (1 - distance) / (1 + distance)
        assert accepted / DRAWS > bound - 3 * math.sqrt(bound * (1 - bound) / DRAWS)


def test_tokens_are_chosen_lazily_after_their_own_context() -> None:
    rows = torch.stack([make_logits(seed) for seed in range(3)])
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, seed=4, prompt_length=2)
    tokens = [7, 3, 9, 9, 1]
    expected = [choose_token(row, params, tokens[:end]) for row, end in zip(rows, (3, 4, 5), strict=True)]
    assert list(choose_tokens(rows, SequenceRows(SequenceRules(params), tokens, 3))) == expected
    with mock.patch("specpool.engine.sampling.sampler._choose", side_effect=[5, AssertionError]):
        assert next(choose_tokens(rows, SequenceRows(SequenceRules(params), tokens, 3))) == 5
