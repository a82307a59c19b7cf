"""A fingerprint of what an engine computes: equal if the same tokens would be chosen, bit for bit."""

import hashlib

import torch

from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine

TOKENS = 72
"""Beyond the largest tile of attended positions."""
FIRST_PASS, ROWS = 40, 4
STRIDE = 7919


@torch.inference_mode()
def numerics_fingerprint(engine: Engine) -> str:
    """SHA-256 over the logits of a fixed sequence, after some tokens of its beginning and of its end; "" unless logits
    are the same bits in every batch. The cache must hold nothing yet.

    Weights, dtype, kernels, processor or GPU and versions of libraries show in it. So does the number of threads where
    the pass consists of torch's operations, but not where it is compiled.
    """
    if not engine.bitwise:
        return ""
    length = min(TOKENS, engine.max_model_len)
    first = min(FIRST_PASS, length // 2)
    tokens = [i * STRIDE % engine.vocab_size for i in range(length)]
    passes = (Span(0, 0, tokens[:first], ROWS), Span(0, first, tokens[first:], ROWS))
    digest = hashlib.sha256()
    for span in passes:
        digest.update(engine.forward([span]).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
