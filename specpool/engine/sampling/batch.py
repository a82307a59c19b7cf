"""Samples the rows of a pass in compiled code, in GPU kernels, or with torch operations. All choose the same tokens."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, islice

import numpy as np
import torch

from specpool.engine.numerics.elementary import MASS_BITS, masses, negative_log
from specpool.engine.numerics.noise import gumbel
from specpool.engine.numerics.uploads import upload
from specpool.engine.sampling.compiled import NativeSampler, compile_sampler, noise
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.rows import Chosen, SequenceRows
from specpool.engine.sampling.rules import SequenceRules
from specpool.engine.sampling.sampler import choose_batch, choose_tokens, kernel_is_exact, largest_on_host
from specpool.protocol.sampling import Logprobs, SamplingParams

log = logging.getLogger(__name__)

LARGEST_ID = (1 << 31) - 1


def log_probabilities(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Return the log-probability of a token [n] in each row of logits [n, vocab_size], and of the `num_top` largest.

    The normalizer is a sum of integer masses, which does not depend on the order. The smaller token wins ties. The host
    waits once.
    """
    logits = logits.float()
    shifted = logits - logits.amax(-1, keepdim=True)
    total = masses(shifted).sum(-1, keepdim=True).double().float() * 2.0**-MASS_BITS
    logprobs = shifted + negative_log(total)
    ids = torch.arange(logits.shape[1], device=logits.device)
    ranked = _order(logits).long() << 32 | (LARGEST_ID - ids)
    top_ids = LARGEST_ID - (ranked.topk(min(num_top, logits.shape[1])).values & LARGEST_ID)
    columns = logprobs.gather(1, token_ids[:, None]), logprobs.gather(1, top_ids), top_ids
    rows, end = torch.cat([each.double() for each in columns], 1).tolist(), 1 + top_ids.shape[1]
    return Logprobs.of(top_ids.shape[1], ((row[0], map(int, row[end:]), row[1:end]) for row in rows))


def _order(x: torch.Tensor) -> torch.Tensor:
    """Map floats to integers of the same order; -0.0 maps to 0."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    return bits ^ (bits >> 31 & LARGEST_ID)


TRIAL_HEAD, TRIAL_ROWS, TRIAL_NOISE = Head(2000), 2, 2**14
TRIAL_PARAMS = (
    SamplingParams(0.9, seed=1),
    SamplingParams(1.3, top_p=0.95, seed=2),
    SamplingParams(0.7, top_k=50, top_p=0.9, min_p=0.01, seed=3),
    SamplingParams(1.0, top_k=900, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((7, 2.5), (9, -3.0))),
)


class Sampler:
    """Chooses tokens from the outputs of one model's head."""

    def __init__(self, head: Head, device: torch.device, native: bool = True) -> None:
        """`native`: compile code for a CPU."""
        self._head = head
        self._compiled: NativeSampler | None = None
        if native and device.type == "cpu" and compiled_is_exact():
            library = compile_sampler()
            assert library is not None
            self._compiled = NativeSampler(library, head)

    def __call__(self, logits: torch.Tensor, sequences: Sequence[SequenceRows]) -> list[Chosen]:
        """Choose the tokens of each sequence from logits [n, outputs], which are in the order of the sequences."""
        if all(rows.rules is None and rows.num_logprobs is None for rows in sequences):
            return _chosen(*self._greedy(logits, sequences), sequences)
        compiled = self._compiled
        if compiled is not None and all((rows.num_logprobs or 0) <= compiled.outputs for rows in sequences):
            return compiled(logits, sequences)
        known = self._head.over_vocabulary(logits)
        chosen = _chosen(*self._with_torch(logits, known, sequences), sequences)
        return _with_logprobs(known, sequences, chosen)

    def _greedy(
        self, logits: torch.Tensor, sequences: Sequence[SequenceRows]
    ) -> tuple[Sequence[Iterable[int]], list[bool]]:
        """The choices of each sequence, and whether the largest logit of each row is finite."""
        indexes, finite = largest_on_host(logits)
        row_tokens = iter(self._head.token_ids(indexes).tolist())
        return [list(islice(row_tokens, rows.count)) for rows in sequences], finite

    def _with_torch(
        self, logits: torch.Tensor, known: torch.Tensor, sequences: Sequence[SequenceRows]
    ) -> tuple[Sequence[Iterable[int]], list[bool]]:
        """Like `_greedy`. `known`: logits [n, vocab_size]."""
        if kernel_is_exact(known.device, known.dtype, known.shape[1]):
            return choose_batch(known, sequences)
        greedy, finite = self._greedy(logits, sequences)
        split = known.split([rows.count for rows in sequences])
        chosen = [
            tokens if rows.rules is None else choose_tokens(own, rows)
            for tokens, own, rows in zip(greedy, split, sequences, strict=True)
        ]
        return chosen, finite


@cache
def compiled_is_exact() -> bool:
    """Test that compiled code gives the noise, tokens and log-probabilities of torch operations."""
    library = compile_sampler()
    if library is None:
        return False
    rows, generator = TRIAL_ROWS * len(TRIAL_PARAMS), torch.Generator().manual_seed(0)
    logits = torch.randn(rows, TRIAL_HEAD.vocab_size, generator=generator) * 4

    def sequences() -> list[SequenceRows]:
        return [SequenceRows(SequenceRules(each), [7, 7], TRIAL_ROWS, num_logprobs=5) for each in TRIAL_PARAMS]

    chosen = NativeSampler(library, TRIAL_HEAD)(logits, sequences())
    expected = Sampler(TRIAL_HEAD, logits.device, native=False)(logits, sequences())
    ids = torch.arange(TRIAL_NOISE, dtype=torch.int32)
    same_noise = np.array_equal(noise(library, 1, 2, TRIAL_NOISE)[0], gumbel(1, 2, ids).numpy())
    is_exact = chosen == expected and same_noise
    if not is_exact:
        log.warning("compiled sampling differs from torch operations; using torch operations")
    return is_exact


def _chosen(
    choices: Iterable[Iterable[int]], finite: Iterable[bool], sequences: Sequence[SequenceRows]
) -> list[Chosen]:
    rows_finite = iter(finite)
    return [
        Chosen(rows.accepted(tokens), all([*islice(rows_finite, rows.count)]))
        for rows, tokens in zip(sequences, choices, strict=True)
    ]


def _with_logprobs(known: torch.Tensor, sequences: Sequence[SequenceRows], chosen: list[Chosen]) -> list[Chosen]:
    """Add log-probabilities where requested, from logits [n, vocab_size], in one batch for each number of them."""
    firsts = accumulate((rows.count for rows in sequences), initial=0)
    groups = defaultdict[int, list[tuple[int, int]]](list)  # index of a sequence, and of its first row
    for index, (rows, first) in enumerate(zip(sequences, firsts, strict=False)):
        if rows.num_logprobs is not None and chosen[index].token_ids:
            groups[rows.num_logprobs].append((index, first))
    for num_top, members in groups.items():
        places = [first + i for index, first in members for i in range(len(chosen[index].token_ids))]
        tokens = [token for index, _ in members for token in chosen[index].token_ids]
        numbers = upload(torch.tensor([places, tokens]), known.device)
        logprobs, at = log_probabilities(known[numbers[0]], numbers[1], num_top), 0
        for index, _ in members:
            end = at + len(chosen[index].token_ids)
            chosen[index], at = replace(chosen[index], logprobs=logprobs[at:end]), end
    return chosen
