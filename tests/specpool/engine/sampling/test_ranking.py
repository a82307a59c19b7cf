"""Rankings begin with the sampler's choice, and continue in the order of the scores."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling import VOCAB, all_params, contexts, make_logits

from specpool.engine.numerics.noise import gumbel
from specpool.engine.sampling import ranking as ranking_module
from specpool.engine.sampling import ranking_kernel
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.ranking import Ranking, rank_rows
from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import SequenceRules
from specpool.engine.sampling.sampler import choose_token, largest
from specpool.protocol.sampling import SamplingParams

HEAD = Head(VOCAB)


def rank(logits: torch.Tensor, params: SamplingParams | None, context: Sequence[int], count: int) -> Ranking:
    """The ranking of one row."""
    rules = None if params is None else SequenceRules(params)
    (((ranking),),) = rank_rows(logits[None], [SequenceRows(rules, context, 1)], HEAD, count)
    return ranking


@settings(max_examples=150)
@given(params=all_params, context=contexts, seed=st.integers(0, 99), ties=st.booleans(), count=st.integers(1, VOCAB))
def test_a_sampled_ranking_begins_with_the_choice(
    params: SamplingParams, context: tuple[list[int], list[int]], seed: int, ties: bool, count: int
) -> None:
    prompt, generated = context
    params, tokens = replace(params, prompt_length=len(prompt), seed=seed), prompt + generated
    logits = make_logits(seed).round() if ties else make_logits(seed)
    ranking = rank(logits, params, tokens, count)
    assert ranking[0][0] == choose_token(logits, params, tokens)
    assert len({token for token, _ in ranking}) == len(ranking) <= count
    probabilities = [probability for _, probability in ranking]
    assert probabilities == sorted(probabilities, reverse=True)


@pytest.mark.parametrize("seed", range(5))
def test_sampled_tokens_are_in_the_order_of_their_noisy_scores(seed: int) -> None:
    logits, params, context = make_logits(seed), SamplingParams(temperature=0.8, seed=seed), [1, 2, 3]
    scores = logits / params.temperature + gumbel(seed, len(context), torch.arange(VOCAB, dtype=torch.int32))
    ranking = rank(logits, params, context, VOCAB)
    assert [token for token, _ in ranking] == scores.argsort(descending=True).tolist()
    expected = scores.softmax(-1).sort(descending=True).values.tolist()
    assert [probability for _, probability in ranking] == pytest.approx(expected, rel=1e-4)


@settings(max_examples=100)
@given(seed=st.integers(0, 999), distinct=st.integers(1, 6), count=st.integers(1, VOCAB))
def test_greedy_rankings_prefer_low_tokens_of_equal_logits(seed: int, distinct: int, count: int) -> None:
    logits = torch.randint(distinct, (3, VOCAB), generator=torch.Generator().manual_seed(seed)).float()
    (rankings,) = rank_rows(logits, [SequenceRows(None, [1, 2, 3], 3)], HEAD, count)
    for row, ranking in zip(logits, rankings, strict=True):
        assert [token for token, _ in ranking] == sorted(range(VOCAB), key=lambda token: -row[token])[:count]
        expected = [float(row.softmax(-1)[token]) for token, _ in ranking]
        assert [probability for _, probability in ranking] == pytest.approx(expected, rel=1e-4)
    assert [ranking[0][0] for ranking in rankings] == largest(logits).tolist()


def test_rows_of_several_sequences_keep_their_order() -> None:
    logits = torch.stack([make_logits(seed) for seed in range(6)])
    sampled = SequenceRules(SamplingParams(temperature=0.7, seed=1))
    rows = [
        SequenceRows(None, [1, 2], 2),
        SequenceRows(sampled, [1, 2, 3], 3),
        SequenceRows(None, [1], 0),
        SequenceRows(None, [1], 1),
    ]
    first, second, empty, last = rank_rows(logits, rows, HEAD, 3)
    assert empty == []
    best = logits.topk(3).indices.tolist()
    assert [[token for token, _ in ranking] for ranking in (*first, *last)] == [best[0], best[1], best[5]]
    assert second == [rank(logits[2 + i], sampled.params, [1, 2, 3][: 1 + i], 3) for i in range(3)]


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=1.2)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_rank_no_tokens(params: SamplingParams | None, value: float) -> None:
    logits = torch.full((VOCAB,), -math.inf) if value < 0 else make_logits(0)
    logits[3] = value
    assert rank(logits, params, [1], 4) == []


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=1.2)])
def test_tokens_that_cannot_follow_are_not_ranked(params: SamplingParams | None) -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[[3, 9]] = torch.tensor([1.0, 2.0])
    assert {token for token, _ in rank(logits, params, [1], 4)} == {3, 9}


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=1.0)])
def test_outputs_of_a_smaller_head_are_mapped_to_tokens(params: SamplingParams | None) -> None:
    output_ids = torch.tensor([2, 3, 5, 7, 11])
    head, logits = Head(VOCAB, output_ids), make_logits(1, size=5)
    rules = None if params is None else SequenceRules(params)
    ((ranking,),) = rank_rows(logits[None], [SequenceRows(rules, [1], 1)], head, 5)
    assert {token for token, _ in ranking} == set(output_ids.tolist())
    assert ranking == rank(head.over_vocabulary(logits[None])[0], params, [1], 5)


# --- Kernels, in Triton's interpreter


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    distinct=st.integers(1, 9),
    count=st.integers(1, 8),
    output_ids=st.sampled_from([None, [2, 11, 7, 5, 3]]),
    culprit=st.sampled_from([None, math.nan, math.inf, -math.inf]),
)
def test_kernels_rank_greedy_rows_alike(
    seed: int, distinct: int, count: int, output_ids: list[int] | None, culprit: float | None
) -> None:
    pytest.importorskip("triton")
    head = Head(VOCAB, None if output_ids is None else torch.tensor(output_ids))
    logits = torch.randint(distinct, (4, head.outputs), generator=torch.Generator().manual_seed(seed)).float()
    if culprit is not None:
        logits[1, seed % head.outputs], logits[2, 1:] = culprit, -math.inf
    sampled = SequenceRules(SamplingParams(temperature=0.7, seed=1))
    rows = [SequenceRows(None, [1, 2], 2), SequenceRows(sampled, [1], 1), SequenceRows(None, [1], 1)]
    expected = rank_rows(logits, rows, head, count)
    with (
        mock.patch.object(ranking_module, "kernel_is_exact", return_value=True),
        mock.patch.object(ranking_kernel, "PART", 4),
        mock.patch.object(ranking_module, "_read", wraps=ranking_module._read) as read,
    ):
        actual = rank_rows(logits, rows, head, count)
    assert read.call_count <= 2  # all greedy rows, and the sampled one
    for of_kernel, of_torch in zip(chain(*actual), chain(*expected), strict=True):
        assert [token for token, _ in of_kernel] == [token for token, _ in of_torch]
        probabilities = [probability for _, probability in of_torch]
        assert [probability for _, probability in of_kernel] == pytest.approx(probabilities, rel=1e-4)
