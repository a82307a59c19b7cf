"""How a token is chosen from logits: penalties, temperature, truncation, and shared noise.

One row at a time and every row in the same shape, so that the choice has the same bits in every batch. Penalties and
limits are applied in the order of vLLM, each as `transformers` defines it.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from engine.noise import gumbel
from protocol.sampling import SamplingParams, TokenLogprobs

# The most probable tokens that hold top_p nearly always; else all are sorted.
FEW_CANDIDATES = 256


def choose_tokens(logits: torch.Tensor, params: SamplingParams, token_ids: Sequence[int]) -> Iterator[int]:
    """The choice after each of the last n of `token_ids`; `logits` is [n, vocab_size]. Made when it is asked for, since
    nobody asks for those behind a draft token that was wrong."""
    first = len(token_ids) - len(logits) + 1
    for length, row in enumerate(logits, first):
        yield choose_token(row, params, token_ids[:length])


def choose_token(logits: torch.Tensor, params: SamplingParams, context: Sequence[int]) -> int:
    """The token that follows `context`. `logits` is [vocab_size]."""
    logits = adjust(logits.float(), params, context)
    if params.temperature == 0:
        return int(logits.argmax())
    values, token_ids = candidates(logits / params.temperature, params)
    scores = values + gumbel(params.seed, len(context), token_ids.int())
    return int(token_ids[scores.argmax()])


def adjust(logits: torch.Tensor, params: SamplingParams, context: Sequence[int]) -> torch.Tensor:
    """Bias, minimum length and penalties; a copy where anything changes."""
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
    """Logits and ids of the tokens that min_p, top_k and top_p leave: at least the most probable one."""
    least = -math.inf
    best = float(logits.max())
    if params.min_p > 0:
        least = min(best, best + math.log(params.min_p))
    if 0 < params.top_k < len(logits):
        # Tokens as probable as the last of the k stay too.
        least = max(least, float(logits.topk(params.top_k).values[-1]))
    if params.top_p < 1:
        return _nucleus(logits.masked_fill(logits < least, -math.inf), params.top_p)
    if least == -math.inf:
        return logits, torch.arange(len(logits), device=logits.device)
    token_ids = (logits >= least).nonzero().squeeze(1)
    return logits[token_ids], token_ids


def _nucleus(logits: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable tokens that together hold `top_p`: a token is one of them if those before it hold less."""
    whole = logits.logsumexp(0)
    values, token_ids = logits.topk(min(FEW_CANDIDATES, len(logits)))
    if (values - whole).exp().sum() <= top_p:
        values, token_ids = logits.sort(descending=True)
    # Sums in an order that is the same every time, which a GPU's are not.
    mass = (values - whole).exp().cpu()
    keep = (mass.cumsum(0) - mass < top_p).to(values.device)
    keep[0] = True
    return values[keep], token_ids[keep]


def token_logprobs(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """`logits` is [vocab_size]; `count` is n."""
    logprobs = logits.float().log_softmax(0)
    values, token_ids = logprobs.topk(min(count, len(logprobs)))
    top = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token_id]), top)
