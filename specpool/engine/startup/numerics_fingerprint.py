"""A fingerprint of what an engine computes: equal if the same tokens would be chosen, bit for bit."""

import hashlib

import torch

from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine

TOKENS = 72
"""More than the largest tile of attended positions."""
FIRST_PASS, ROWS = 40, 4
STRIDE = 7919


def numerics_fingerprint(engine: Engine) -> str:
    """`logits_digest` of an engine whose logits are the same bits in every batch; "" of any other.

    It depends on weights, dtype, kernels, device and library versions. It depends on the number of threads only if the
    pass consists of torch operations.
    """
    return logits_digest(engine) if engine.bitwise else ""


@torch.inference_mode()
def logits_digest(engine: Engine) -> str:
    """SHA-256 over logits at the start and at the end of a fixed sequence. Overwrites the first slot."""
    length = min(TOKENS, engine.max_model_len)
    first = min(FIRST_PASS, length // 2)
    tokens = [i * STRIDE % engine.vocab_size for i in range(length)]
    passes = (Span(0, 0, tokens[:first], ROWS), Span(0, first, tokens[first:], ROWS))
    digest = hashlib.sha256()
    for span in passes:
        digest.update(engine.forward([span]).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
