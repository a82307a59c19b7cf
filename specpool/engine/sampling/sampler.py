"""Sampling with torch operations: penalties, temperature, truncation, and shared noise.

Equal logits give the same token here, in compiled code (native/) and in the kernels of a GPU. Penalties and limits
apply in vLLM's order, each as transformers defines it. Unlike there, ties with the last kept token are kept, too.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specpool.engine.numerics.elementary import masses
from specpool.engine.numerics.noise import argmax_with_noise
from specpool.engine.sampling.change_kernel import change_rows
from specpool.engine.sampling.kernel import has_kernels, sample_rows
from specpool.engine.sampling.lexers import BITS
from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import Changes, SequenceRules
from specpool.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

# Number of candidates that nearly always reach top_p; otherwise all logits are sorted.
NUCLEUS_CANDIDATES = 256


def choose_tokens(logits: torch.Tensor, rows: SequenceRows) -> Iterator[int]:
    """Yield the choice of each row of a sequence, given its logits [rows.count, vocab_size].

    Lazy, because the caller stops at the first rejected draft token.
    """
    assert rows.rules is not None
    for row, length, changes in zip(logits, rows.lengths, rows.changes(), strict=True):
        yield _choose(row, rows.rules.params, length, changes)


def choose_batch(logits: torch.Tensor, sequences: Sequence[SequenceRows]) -> tuple[list[list[int]], list[bool]]:
    """Choose the tokens of several sequences on a GPU, with one synchronization.

    `logits` is [n, vocab_size], in the order of the sequences. Also return whether each row's largest logit is finite.
    """
    rows = [(each.params, changes) for each in sequences for changes in each.changes()]
    changed_logits = change_rows(logits, rows) if any(changes is not None for _, changes in rows) else None
    rules = [(rows.params, length) for rows in sequences for length in rows.lengths]
    chosen, finite = sample_rows(logits, rules, changed_logits)
    row_tokens = iter(chosen)
    return [list(islice(row_tokens, rows.count)) for rows in sequences], finite


@cache
def kernel_is_exact(device: torch.device, dtype: torch.dtype, vocab_size: int) -> bool:
    """Whether `choose_batch` works for such logits: test that a few rows get the same tokens as on the CPU."""
    if not has_kernels(device):
        return False
    penalties: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    limits: list[dict[str, Any]] = [{}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}]
    rules = [SamplingParams(0.8, seed=row, **limits[row // 4], **penalties) for row in range(8)]
    logits = (torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    try:
        for changes in (None, _trial_changes(vocab_size)):
            given, rows = logits.to(device), [(params, changes) for params in rules]
            changed_logits = None if changes is None else change_rows(given, rows)
            chosen, finite = sample_rows(given, [(params, 1) for params in rules], changed_logits)
            expected = [_choose(row, params, 1, changes) for row, params in zip(logits, rules, strict=True)]
            if chosen != expected or not all(finite):
                log.warning("sampling kernel chose %s instead of %s; sampling row by row", chosen, expected)
                return False
    except Exception as error:  # the compiler for this GPU may raise anything
        log.warning("sampling kernel failed (%s); sampling row by row", error)
        return False
    return True


def _trial_changes(vocab_size: int) -> Changes:
    """Changes of every kind, for many tokens."""
    ids = np.arange(vocab_size, dtype=np.int32)
    allowed = np.full(-(-vocab_size // BITS), 0xBEEFCAFE, np.uint32)
    return Changes(ids, (ids % 5).astype(np.float32), ids[3:4], allowed, ids, ids % 4 - 1)


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the index [n] of the largest logit in each row of [n, head rows]. The first wins ties; NaN is largest."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(-1))  # numpy takes a fifth of the time
    return logits.argmax(-1)


def largest_on_host(logits: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
    """Return the result of `largest` on the host, and whether the largest logit of each row is finite."""
    if logits.device.type != "cpu":
        return reduce_and_copy(logits)
    indexes = largest(logits)
    # Indexing numpy rows takes half the time of a vectorized operation. Numpy has no bfloat16.
    rows = logits.numpy() if logits.dtype == torch.float32 else logits
    return indexes, [math.isfinite(row[index]) for row, index in zip(rows, indexes.tolist(), strict=True)]


def reduce_and_copy(logits: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
    """`largest_on_host` on a GPU, with one kernel for indexes and logits, and one copy to the host."""
    count = len(logits)
    found = torch.empty(2, count, dtype=torch.int64, device=logits.device)
    torch.max(logits, -1, out=(found[1].view(logits.dtype)[:count], found[0]))
    indexes, values = found.cpu()
    return indexes, [*map(math.isfinite, values.view(logits.dtype)[:count].tolist())]


def choose_token(logits: torch.Tensor, params: SamplingParams, context: Sequence[int]) -> int:
    """Choose the token after `context` from logits [vocab_size]."""
    (changes,) = SequenceRules(params).changes(context, 1)
    return _choose(logits, params, len(context), changes)


def _choose(logits: torch.Tensor, params: SamplingParams, length: int, changes: Changes | None) -> int:
    logits = changed(logits.float(), params, changes)
    if float32(params.temperature) == 0:
        return int(logits.argmax())
    values, token_ids = candidates(logits / params.temperature, params)
    return argmax_with_noise(values, params.seed, length, token_ids.int())


def changed(logits: torch.Tensor, params: SamplingParams, changes: Changes | None) -> torch.Tensor:
    """Apply bias, masks and penalties to float32 logits [vocab_size]; copies them if anything changes."""
    if changes is None:
        return logits
    logits, device = logits.clone(), logits.device

    def on_device(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    logits[on_device(changes.bias_ids)] += on_device(changes.biases)
    logits[on_device(changes.masked_ids)] = -torch.inf
    if changes.allowed is not None:
        bits = on_device(np.unpackbits(changes.allowed.view(np.uint8), bitorder="little"))
        logits[bits[: len(logits)] == 0] = -torch.inf
    counted, counts = on_device(changes.counted_ids), on_device(changes.counts)
    values = logits[counted]
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    # Dividing by a tensor rounds correctly. On a GPU, torch multiplies by the reciprocal of a number.
    repetition, frequency, presence = on_device(np.array(penalties, np.float32))
    penalized = torch.where(values < 0, values * repetition, values / repetition)
    penalized = torch.where(counts > 0, penalized - (frequency * counts + presence), penalized)
    logits[counted] = torch.where(counts >= 0, penalized, values)
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
