"""Log-probabilities with the same bits on every device, in any batch."""

import torch

from specpool.engine.numerics.elementary import MASS_BITS, masses, negative_log
from specpool.protocol.sampling import Logprobs

LARGEST_ID = (1 << 31) - 1


def log_probabilities(logits: torch.Tensor, token_ids: list[int], num_top: int) -> Logprobs:
    """Return the log-probability of a token in each row of logits [n, vocab_size], and of the `num_top` largest.

    The normalizer is a sum of integer masses, which does not depend on the order. The smaller token wins ties.
    """
    logits = logits.float()
    shifted = logits - logits.amax(-1, keepdim=True)
    total = masses(shifted).sum(-1, keepdim=True).double().float() * 2.0**-MASS_BITS
    logprobs = shifted + negative_log(total)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ranked = _order(logits).long() << 32 | (LARGEST_ID - ids)
    top_ids = LARGEST_ID - (ranked.topk(min(num_top, logits.shape[1])).values & LARGEST_ID)
    rows = zip(chosen[:, 0].tolist(), top_ids.tolist(), logprobs.gather(1, top_ids).tolist(), strict=True)
    return Logprobs.of(top_ids.shape[1], rows)


def _order(x: torch.Tensor) -> torch.Tensor:
    """Map floats to integers of the same order; -0.0 maps to 0."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    return bits ^ (bits >> 31 & LARGEST_ID)
