"""Ranks the best next tokens of rows of logits. Only drafts need more than the first one.

On a GPU, kernels rank greedy rows. Everything else uses torch operations.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from specpool.engine.numerics.noise import gumbel
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.ranking_kernel import rank_greedy
from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import Changes
from specpool.engine.sampling.sampler import candidates, changed, float32, kernel_is_exact, largest
from specpool.protocol.sampling import SamplingParams

MAX_COPIED = 2**24
"""Maximum logits to rank at a time with torch operations, which copy them."""

Ranking = list[tuple[int, float]]
"""Tokens, best first, with a probability each."""


def rank_rows(logits: torch.Tensor, sequences: Sequence[SequenceRows], head: Head, count: int) -> list[list[Ranking]]:
    """The rankings of each sequence's rows, from logits [n, outputs], which are in the order of the sequences.

    The first token of a ranking is the one that `Sampler` chooses. Rows whose largest logit is not finite rank no
    tokens. On a GPU, the host waits once for all greedy rows, and several times for each sampled row.
    """
    firsts = [*accumulate((rows.count for rows in sequences), initial=0)]
    greedy = [
        index
        for first, rows in zip(firsts, sequences, strict=False)
        for index in range(first, first + rows.count)
        if rows.rules is None
    ]
    of_greedy = iter(_rank_greedy(logits, greedy, head, count))
    return [
        [next(of_greedy) for _ in range(rows.count)]
        if rows.rules is None
        else list(_rank_sampled(logits[first : first + rows.count], rows, head, count))
        for first, rows in zip(firsts, sequences, strict=False)
    ]


def _rank_greedy(logits: torch.Tensor, rows: Sequence[int], head: Head, count: int) -> list[Ranking]:
    """The rankings of greedy rows among logits [n, outputs]."""
    if rows and kernel_is_exact(logits.device, logits.dtype, head.vocab_size):
        rankings = _read(rank_greedy(logits, head, min(count, head.outputs)))
        return [rankings[row] for row in rows]
    size = max(1, MAX_COPIED // logits.shape[1])
    parts = (logits[rows[first : first + size]] for first in range(0, len(rows), size))
    return [ranking for part in parts for ranking in _best(part, count, head.token_ids)]


def _rank_sampled(logits: torch.Tensor, rows: SequenceRows, head: Head, count: int) -> Iterator[Ranking]:
    """The rankings of a sequence's rows [rows.count, outputs]."""
    assert rows.params is not None
    known = head.over_vocabulary(logits)
    for row, length, changes in zip(known, rows.lengths, rows.changes(), strict=True):
        if math.isfinite(float(row.max())):
            scores, token_ids = _noisy_scores(row, rows.params, length, changes)
            (ranking,) = _best(scores[None], count, token_ids.__getitem__)
            yield ranking
        else:
            yield []


def _noisy_scores(
    logits: torch.Tensor, params: SamplingParams, length: int, changes: Changes | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores and ids of the tokens that may be sampled from logits [vocab_size], as `choose_tokens` adds them."""
    logits = changed(logits.float(), params, changes)
    if float32(params.temperature) == 0:
        return logits, torch.arange(len(logits), device=logits.device)
    values, token_ids = candidates(logits / params.temperature, params)
    return values + gumbel(params.seed, length, token_ids.int()), token_ids


def _best(scores: torch.Tensor, count: int, token_ids: Callable[[torch.Tensor], torch.Tensor]) -> list[Ranking]:
    """Rank the rows of scores [n, outputs] with their softmax. The first output wins ties.

    `token_ids`: maps outputs to tokens.
    """
    scores = scores.to(torch.float32, copy=True)
    total, ranked = scores.logsumexp(-1), []
    for _ in range(min(count, scores.shape[1])):
        outputs = largest(scores)
        logprobs = scores.gather(1, outputs[:, None]).squeeze(1) - total
        ranked.append(torch.stack([token_ids(outputs).double(), logprobs.double()], -1))
        scores.scatter_(1, outputs[:, None], -torch.inf)
    return _read(torch.stack(ranked, 1))


def _read(ranked: torch.Tensor) -> list[Ranking]:
    """The rankings of rows, given tokens and log-probabilities [n, count, 2]."""
    # A log-probability is finite if its score and the largest one are.
    return [
        [(int(token), math.exp(logprob)) for token, logprob in row if math.isfinite(logprob)] for row in ranked.tolist()
    ]
