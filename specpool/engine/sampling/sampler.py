"""Sampling: penalties, temperature, truncation, and shared noise.

A CPU samples one row at a time, a GPU a whole batch; equal logits give the same token on both. Penalties and limits
apply in vLLM's order, each as transformers defines it. Unlike there, ties with the last kept token are kept, too.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice

import numpy as np
import torch

from specpool.engine.numerics.elementary import masses
from specpool.engine.numerics.noise import argmax_with_noise
from specpool.engine.sampling.kernel import has_kernels, sample_rows
from specpool.protocol.sampling import SamplingParams, TokenLogprobs

log = logging.getLogger(__name__)

# Number of candidates that nearly always reach top_p; otherwise all logits are sorted.
NUCLEUS_CANDIDATES = 256


def choose_tokens(logits: torch.Tensor, params: SamplingParams, token_ids: Sequence[int]) -> Iterator[int]:
    """Yield the choice after each of the last n tokens, given logits [n, vocab_size].

    Lazy, because the caller stops at the first rejected draft token.
    """
    first = len(token_ids) - len(logits) + 1
    for length, row in enumerate(logits, first):
        yield choose_token(row, params, token_ids[:length])


def choose_batch(
    logits: torch.Tensor, sequences: Sequence[tuple[SamplingParams | None, Sequence[int], int]]
) -> list[list[int]]:
    """Choose tokens for several sequences on a GPU, with one synchronization.

    `logits` is [n, vocab_size]. A sequence is its parameters (None: greedy), its tokens, and its number of rows, which
    follow its last tokens as in `choose_tokens`.
    """
    rules = [
        (params, token_ids, len(token_ids) - count + 1 + i)
        for params, token_ids, count in sequences
        for i in range(count)
    ]
    if any(params is not None and not params.leaves_logits for params, _, _ in rules):
        logits = logits.to(torch.float32, copy=True)
        for row, (params, token_ids, length) in zip(logits, rules, strict=True):
            if params is not None and not params.leaves_logits:
                row.copy_(adjust(row, params, token_ids[:length]))
    chosen = iter(sample_rows(logits, [(params, length) for params, _, length in rules]))
    return [list(islice(chosen, count)) for _, _, count in sequences]


@cache
def kernel_is_exact(device: torch.device, dtype: torch.dtype, vocab_size: int) -> bool:
    """Whether `choose_batch` works for such logits: test that a few rows get the same tokens as on the CPU."""
    if not has_kernels(device):
        return False
    rows = 8
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    rules = [SamplingParams(0.9, seed=row) for row in range(rows // 2)]
    rules += [SamplingParams(0.7, top_k=50, top_p=0.9, min_p=0.01, seed=row) for row in range(rows // 2)]
    try:
        for row_dtype in (dtype, torch.float32):  # rows with penalties are float32
            chosen = sample_rows(logits.to(device, row_dtype), [(params, 1) for params in rules])
            expected = [choose_token(row.to(row_dtype), params, [0]) for row, params in zip(logits, rules, strict=True)]
            if chosen != expected:
                log.warning("sampling kernel chose %s instead of %s; sampling row by row", chosen, expected)
                return False
    except Exception as error:  # the compiler for this GPU may raise anything
        log.warning("sampling kernel failed (%s); sampling row by row", error)
        return False
    return True


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the index [n] of the largest logit in each row of [n, head rows]. The first wins ties; NaN is largest."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(-1))  # numpy takes a fifth of the time
    return logits.argmax(-1)


def choose_token(logits: torch.Tensor, params: SamplingParams, context: Sequence[int]) -> int:
    """Choose the token after `context` from logits [vocab_size]."""
    logits = adjust(logits.float(), params, context)
    if float32(params.temperature) == 0:
        return int(logits.argmax())
    values, token_ids = candidates(logits / params.temperature, params)
    return argmax_with_noise(values, params.seed, len(context), token_ids.int())


def adjust(logits: torch.Tensor, params: SamplingParams, context: Sequence[int]) -> torch.Tensor:
    """Apply bias, minimum length and penalties; copies the logits if anything changes."""
    if params.leaves_logits:
        return logits
    logits = logits.clone()
    generated = context[params.prompt_length :]
    device = logits.device
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits[torch.tensor(ids, device=device)] += torch.tensor(biases, device=device)
    if len(generated) < params.min_tokens and params.stop_token_ids:
        logits[torch.tensor(params.stop_token_ids, device=device)] = -math.inf
    if params.repetition_penalty != 1 and context:
        seen = torch.tensor(context, device=device).unique()
        values = logits[seen]
        logits[seen] = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    if generated and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.tensor(generated, device=device).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


def candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and ids of the tokens that min_p, top_k and top_p keep, always at least the most probable.

    Each limit is a minimum logit, so ties with the last kept token are kept too.
    """
    best = float(logits.max())
    minimum = -math.inf
    if math.isfinite(best):
        if params.min_p > 0:
            minimum = float32(best + float32(math.log(params.min_p)))
        if 0 < params.top_k < len(logits):
            minimum = max(minimum, float(logits.topk(params.top_k).values[-1]))
        if float32(params.top_p) < 1:
            minimum = max(minimum, _nucleus(logits[logits >= minimum], best, params.top_p))
    if minimum == -math.inf:
        return logits, torch.arange(len(logits), device=logits.device)
    token_ids = (logits >= minimum).nonzero().squeeze(1)
    return logits[token_ids], token_ids


def _nucleus(logits: torch.Tensor, best: float, top_p: float) -> float:
    """Return the smallest logit of the smallest set of most probable tokens that holds `top_p`."""
    limit = float(masses(logits - best).sum()) * float32(top_p)
    values = logits.topk(min(NUCLEUS_CANDIDATES, len(logits))).values
    mass = masses(values - best)
    if float(mass.sum()) < limit:
        values = logits.sort(descending=True).values
        mass = masses(values - best)
    before = mass.cumsum(0) - mass
    return float(values[max(0, int((before.double() < limit).sum()) - 1)])


def float32(x: float) -> float:
    """Round x to float32, as GPU kernels receive their parameters."""
    return float(np.float32(x))


def token_logprobs(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Return the log probabilities of a token and of the `count` most probable ones, from logits [vocab_size]."""
    logprobs = logits.float().log_softmax(0)
    values, token_ids = logprobs.topk(min(count, len(logprobs)))
    top = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token_id]), top)
