"""The sampler draws from the softmax that it claims, whatever the draft; its rules are those of transformers."""

import math
import random
from collections import Counter
from dataclasses import replace
from operator import eq
from unittest import mock

import numpy as np
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

from specpool.engine.numerics import noise
from specpool.engine.numerics.noise import gumbel
from specpool.engine.sampling.sampler import adjust, candidates, choose_token, choose_tokens, largest
from specpool.protocol.sampling import SamplingParams

VOCAB = 40
DRAWS = 5_000
# Of chi-squared with 39 degrees of freedom.
QUANTILE_99_9 = 72.05


@given(
    st.integers(1, 300).flatmap(
        lambda size: st.lists(
            st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 2.5, math.inf, math.nan]), min_size=size, max_size=size),
            min_size=1,
            max_size=4,
        )
    )
)
def test_the_largest_logit_is_the_one_that_torch_finds(rows: list[list[float]]) -> None:
    """Of several that are the largest, the first, NaN included, in padded rows, too."""
    logits = torch.tensor(rows)
    assert largest(logits).tolist() == logits.argmax(-1).tolist()
    padded = torch.nn.functional.pad(logits, (0, 3), value=math.inf)[:, : logits.shape[1]]
    assert largest(padded).tolist() == logits.argmax(-1).tolist()
    assert largest(logits.bfloat16()).tolist() == logits.argmax(-1).tolist()


def logits_at(expected: torch.Tensor, got: torch.Tensor, where: torch.Tensor) -> list[float]:
    """The values of tokens that only one of the two has left."""
    return torch.maximum(expected, got)[where].tolist()


def make_logits(seed: int, size: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


# --- The rules, against transformers


def processors(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """The same rules by transformers, in the same order."""
    found = LogitsProcessorList()
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    if params.min_tokens and params.stop_token_ids:
        stops = list(params.stop_token_ids)
        found.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, stops))
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    found.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        found.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(TopPLogitsWarper(params.top_p))
    return found


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


@settings(max_examples=300, deadline=None)
@given(params=all_params, context=contexts, seed=st.integers(0, 50), ties=st.booleans(), few=st.integers(1, VOCAB))
def test_the_rules_are_those_of_transformers(
    params: SamplingParams, context: tuple[list[int], list[int]], seed: int, ties: bool, few: int
) -> None:
    """Also where tokens are as probable as each other, and where the first look is at too few of them."""
    prompt, generated = context
    tokens = prompt + generated
    logits = make_logits(seed).round() if ties else make_logits(seed)
    params = replace(params, prompt_length=len(prompt))
    expected = processors(params, len(prompt))(torch.tensor([tokens]), logits[None].clone())[0]
    with mock.patch("specpool.engine.sampling.sampler.FEW_CANDIDATES", few):
        values, token_ids = candidates(adjust(logits, params, tokens) / params.temperature, params)
    got = torch.full((VOCAB,), -math.inf).index_put((token_ids,), values)
    # Whether a token at the very edge of top_p is in depends on the order of a sum, and among equals on their order.
    edge = torch.isinf(got) != torch.isinf(expected)
    assert len(set(logits_at(expected, got, edge))) <= (params.top_p < 1)
    assert ties or edge.sum() <= (params.top_p < 1)
    torch.testing.assert_close(got[~edge], expected[~edge])


@given(frequency=st.sampled_from([-1.0, 0.0, 0.5]), presence=st.sampled_from([-1.0, 0.0, 1.5]), context=contexts)
def test_frequency_and_presence_count_what_was_generated(
    frequency: float, presence: float, context: tuple[list[int], list[int]]
) -> None:
    prompt, generated = context
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence, prompt_length=len(prompt))
    logits = make_logits(1)
    counts = Counter(generated)
    expected = [
        logits[token].item() - frequency * counts[token] - presence * (counts[token] > 0) for token in range(VOCAB)
    ]
    got = adjust(logits, params, prompt + generated)
    torch.testing.assert_close(got, torch.tensor(expected))


def test_the_logits_given_are_left_as_they_are() -> None:
    logits = make_logits(0)
    before = logits.clone()
    params = SamplingParams(1.0, 5, 0.9, 0.01, 1.2, 0.3, 0.3, 4, (1, 2), ((3, 5.0),), 9, 1)
    choose_token(logits, params, [1, 2, 3])
    assert torch.equal(logits, before)


def test_many_candidates_are_no_fewer_than_top_p_asks_for() -> None:
    """More tokens than are looked at first."""
    nearly_flat = torch.linspace(0, 1e-4, 2_000)
    values, _ = candidates(nearly_flat, SamplingParams(temperature=1, top_p=0.5))
    assert abs(len(values) - 1_000) <= 1


@pytest.mark.parametrize("rule", [{"top_p": 0.3}, {"top_k": 3}, {"top_k": 9, "top_p": 0.3}])
def test_tokens_as_probable_as_the_last_one_that_is_left_stay_too(rule: dict[str, float]) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, 2.0])
    _, token_ids = candidates(logits, SamplingParams(temperature=1, **rule))
    assert token_ids.tolist() == [1, 3, 4, 5]


@pytest.mark.parametrize("value", [-math.inf, math.inf])
def test_logits_without_a_finite_one_have_a_choice(value: float) -> None:
    params = SamplingParams(temperature=1, top_k=2, top_p=0.5, min_p=0.1)
    assert choose_token(torch.full((9,), value), params, [1]) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_best_token_always_stays(temperature: float) -> None:
    logits = make_logits(5)
    params = SamplingParams(temperature, top_k=1, top_p=0.0, min_p=1.0)
    assert choose_token(logits, params, [1]) == int(logits.argmax())


# --- The distribution


def chi_squared(counts: Counter[int], probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.total()
    observed = torch.tensor([counts[token] for token in range(len(probabilities))], dtype=torch.float64)
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_samples_have_the_distribution_of_the_softmax(vary: str) -> None:
    logits, params = make_logits(3, spread=1.0), {"temperature": 0.8}
    drawn: Counter[int] = Counter()
    for i in range(DRAWS):
        seed, length = (i, 7) if vary == "seed" else (7, i)
        drawn[choose_token(logits, SamplingParams(**params, seed=seed), range(length))] += 1
    assert chi_squared(drawn, (logits / 0.8).softmax(0)) < QUANTILE_99_9


def test_truncated_samples_have_the_truncated_distribution() -> None:
    logits = make_logits(4, spread=1.0)
    params = {"temperature": 1.0, "top_k": 12, "top_p": 0.9}
    values, token_ids = candidates(logits, SamplingParams(**params))
    drawn = Counter(choose_token(logits, SamplingParams(**params, seed=i), [0] * 9) for i in range(DRAWS))
    assert set(drawn) <= set(token_ids.tolist())
    by_rank = Counter({rank: drawn[token] for rank, token in enumerate(token_ids.tolist())})
    assert chi_squared(by_rank, values.softmax(0)) < QUANTILE_99_9


DRAFTS = {
    "good": lambda logits: logits + make_logits(9, spread=0.3),
    "bad": lambda logits: make_logits(8, spread=2.0),
    "adversarial": lambda logits: -logits,
}


def draws(logits: torch.Tensor) -> list[int]:
    """The choice with each seed, in the same place."""
    return [choose_token(logits, SamplingParams(temperature=1.0, seed=seed), [0] * 5) for seed in range(DRAWS)]


def test_speculation_leaves_the_distribution_alone_and_accepts_by_the_bound() -> None:
    """What is emitted is the target's own choice, so a draft cannot bias it; the shared noise makes them agree at least
    as often as (1 - TV) / (1 + TV), the bound of Daliri et al."""
    target = make_logits(3, spread=1.0)
    emitted = draws(target)
    assert chi_squared(Counter(emitted), target.softmax(0)) < QUANTILE_99_9
    for draft in DRAFTS.values():
        assert_accepted_by_the_bound(target, emitted, draft(target))


def assert_accepted_by_the_bound(target: torch.Tensor, emitted: list[int], proposed: torch.Tensor) -> None:
    accepted = sum(map(eq, draws(proposed), emitted))
    distance = float((target.softmax(0) - proposed.softmax(0)).abs().sum() / 2)
    bound = (1 - distance) / (1 + distance)
    assert accepted / DRAWS > bound - 3 * math.sqrt(bound * (1 - bound) / DRAWS)


# --- The noise


def test_noise_is_gumbel_and_independent() -> None:
    token_ids = torch.arange(5_000, dtype=torch.int32)
    drawn = torch.stack([gumbel(11, position, token_ids) for position in range(100)])
    assert torch.isfinite(drawn).all()
    assert drawn.mean() == pytest.approx(0.5772, abs=0.01)
    assert drawn.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for rows in (drawn, drawn.T[:100, :], torch.stack([gumbel(seed, 3, token_ids) for seed in range(100)])):
        correlations = torch.corrcoef(rows).fill_diagonal_(0)
        assert correlations.abs().max() < 6 / math.sqrt(rows.shape[1])


@given(
    seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31), chosen=st.lists(st.integers(0, 99_999), max_size=9)
)
def test_a_tokens_noise_does_not_depend_on_which_others_are_asked_for(
    seed: int, position: int, chosen: list[int]
) -> None:
    """So a draft with a smaller vocabulary shares it."""
    all_of_them = gumbel(seed, position, torch.arange(100_000, dtype=torch.int32))
    some = gumbel(seed, position, torch.tensor(chosen, dtype=torch.int32))
    assert torch.equal(some, all_of_them[torch.tensor(chosen, dtype=torch.long)])


def test_the_noise_never_changes_between_releases() -> None:
    """A seed that a client keeps must give the same tokens tomorrow."""
    drawn = gumbel(42, 1_000, torch.tensor([0, 1, 50_000, 2**31 - 1], dtype=torch.int32))
    assert [x.hex() for x in drawn.tolist()] == [
        "-0x1.9a040a0000000p+0",
        "-0x1.4cb22c0000000p+0",
        "-0x1.8fe2d60000000p+0",
        "0x1.0f05280000000p+0",
    ]


def test_the_noise_is_precise_and_finite_for_all_bits() -> None:
    ends = [torch.arange(-(2**31), -(2**31) + 5_000), torch.arange(-5_000, 5_000), torch.arange(2**31 - 5_000, 2**31)]
    bits = torch.cat(
        [*ends, torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0))]
    ).int()
    uniform = noise._uniform(bits)
    assert (uniform.min().item(), uniform.max().item()) == (2.0**-33, 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-uniform.double().numpy()))
    got = noise._gumbel(bits)
    errors = np.abs(got.double().numpy() - exact) / np.spacing(np.maximum(np.abs(exact), 1).astype(np.float32))
    assert errors.max() < 3  # units in the last place
    too_large = noise._gumbel_bound(bits) - got
    assert 0 <= too_large.min() <= too_large.max() < noise._BOUND_ERROR


@given(
    size=st.sampled_from([1, 2, 40, 1_000, 20_000]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_noise_left_out_would_not_have_been_the_largest(size: int, spread: float, seed: int) -> None:
    values = make_logits(seed, size, spread)
    values[seed % size :: 3] = -math.inf
    token_ids = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).int()
    expected = token_ids[(values + gumbel(seed, 5, token_ids)).argmax()]
    assert noise.largest_with_noise(values, seed, 5, token_ids) == int(expected)


@pytest.mark.parametrize("rules", [{}, {"top_p": 0.95}, {"top_k": 40}, {"min_p": 0.05, "repetition_penalty": 1.2}])
def test_rows_in_any_batch_choose_the_same(rules: dict[str, float]) -> None:
    rng = random.Random(0)
    rows = torch.stack([make_logits(seed, 5_000) for seed in range(8)])
    params = SamplingParams(temperature=1.0, seed=4, prompt_length=3, **rules)
    alone = [choose_token(row.clone(), params, [0] * 9) for row in rows]
    for _ in range(5):
        order = rng.sample(range(8), rng.randint(1, 8))
        assert [choose_token(row, params, [0] * 9) for row in rows[order]] == [alone[i] for i in order]


def test_each_token_is_chosen_after_its_own_context_and_only_when_it_is_asked_for() -> None:
    rows = torch.stack([make_logits(seed) for seed in range(3)])
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, seed=4, prompt_length=2)
    tokens = [7, 3, 9, 9, 1]
    expected = [choose_token(row, params, tokens[:end]) for row, end in zip(rows, (3, 4, 5), strict=True)]
    assert list(choose_tokens(rows, params, tokens)) == expected
    with mock.patch("specpool.engine.sampling.sampler.choose_token", side_effect=[5, AssertionError]):
        assert next(choose_tokens(rows, params, tokens)) == 5
