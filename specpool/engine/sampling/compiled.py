"""Chooses the tokens of a batch, with their log-probabilities, in one call of compiled code (native/sampler.c)."""

import ctypes
import math
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specpool.engine.native.compiler import POOL, VECTORS, compile_library
from specpool.engine.numerics.noise import noise_keys
from specpool.engine.numerics.tiles import round_up
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.rows import Chosen, SequenceRows
from specpool.engine.sampling.rules import Changes, Ids
from specpool.protocol.sampling import Logprobs, SamplingParams

FOLDER = Path(__file__).parent / "native"
ROWS = FOLDER / "sampling.h"
"""The header that declares the structs."""
SOURCES = (*(FOLDER / name for name in ("sampler.c", "limits.h", "elementary.h")), ROWS, POOL, VECTORS)
FLAGS = ("-fno-fast-math", "-ffp-contract=off")
"""Every operation rounds, as in torch."""
BLOCK = 256
"""Logits of a block, as in limits.h."""
SAMPLED, GREEDY = range(2)
NO_TOKEN, NOTHING_REJECTED = -1, 2**31 - 1


class Row(Structure):
    """A row of logits, its sampling parameters, and the result."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("logits", "bias_ids", "masked_ids", "allowed", "counted_ids", "biases", "counts")
        ),
        *((name, c_int64) for name in ("num_biases", "num_masked", "num_counted")),
        *((name, c_void_p) for name in ("top_ids", "top_logprobs")),
        ("num_top", c_int64),
        *((name, c_float) for name in ("temperature", "log_min_p", "top_p", "repetition", "frequency", "presence")),
        *((name, c_int32) for name in ("top_k", "first_key", "second_key", "kind")),
        *((name, c_int32) for name in ("sequence", "position", "expected", "token", "is_finite")),
        ("logprob", c_float),
    )


class Batch(Structure):
    """The rows of a pass."""

    _fields_ = (
        ("rows", POINTER(Row)),
        *((name, c_int64) for name in ("num_rows", "outputs", "vocabulary", "threads")),
        *((name, c_void_p) for name in ("token_ids", "runs", "outputs_of", "rejected", "workspace", "pool")),
    )


class NativeSampler:
    """Samples from the outputs of one head."""

    def __init__(self, library: ctypes.CDLL, head: Head) -> None:
        self.library, self.vocab_size = library, head.vocab_size
        tokens = np.arange(head.vocab_size) if head.output_ids is None else head.output_ids.numpy()
        self.outputs = len(tokens)
        self._token_ids = np.zeros(round_up(self.outputs, BLOCK), np.int32)
        self._token_ids[: self.outputs] = tokens
        blocks = self._token_ids.reshape(-1, BLOCK)
        self._runs = ((np.diff(blocks) == 1).all(1) & (blocks[:, 0] % 32 == 0)).astype(np.uint8)
        self._outputs_of = np.full(head.vocab_size, NO_TOKEN, np.int32)
        self._outputs_of[tokens] = np.arange(self.outputs)
        self._workspace = np.empty(0, np.float32)

    def __call__(self, logits: torch.Tensor, sequences: Sequence[SequenceRows]) -> list[Chosen]:
        """Choose the tokens of each sequence from logits [n, outputs], which are in the order of the sequences."""
        logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        # Rows of one position follow each other, so most rows after a rejected draft token are skipped.
        plan = sorted((position, number) for number, rows in enumerate(sequences) for position in range(rows.count))
        places = {pair: place for place, pair in enumerate(plan)}
        firsts = accumulate((rows.count for rows in sequences), initial=0)
        rows = (Row * len(plan))()
        tops, alive = [_Top(sequence) for sequence in sequences], []
        for number, (first, sequence, top) in enumerate(zip(firsts, sequences, tops, strict=False)):
            changes = sequence.changes()
            alive.append(changes)  # the rows point to its arrays
            template = self.template(sequence.params, number, top.count)
            for position, (length, change) in enumerate(zip(sequence.lengths, changes, strict=True)):
                place = places[position, number]
                rows[place] = template
                rows[place].position = position
                if position < sequence.count - 1:
                    rows[place].expected = sequence.token_ids[length]
                if sequence.params is not None:
                    rows[place].first_key, rows[place].second_key = noise_keys(sequence.params.seed, length)
                point_to_changes(rows[place], change)
                rows[place].logits = logits.data_ptr() + (first + position) * logits.stride(0) * logits.itemsize
                top.point(rows[place], position)
        rejected = np.full(len(sequences), NOTHING_REJECTED, np.int32)
        self.library.sample_batch(byref(self.batch(rows, rejected)))
        return [
            top.chosen([rows[places[position, number]] for position in range(sequence.count)])
            for number, (sequence, top) in enumerate(zip(sequences, tops, strict=True))
        ]

    def template(self, params: SamplingParams | None, number: int = 0, num_top: int = -1) -> Row:
        """The fields that all rows of sequence `number` share. `num_top` -1: no log-probabilities."""
        row = Row(sequence=number, num_top=num_top, kind=GREEDY, expected=NO_TOKEN, top_p=1.0)
        if params is not None:
            row.kind, row.temperature, row.top_p = SAMPLED, params.temperature, params.top_p
            row.log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
            row.top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
            row.repetition = params.repetition_penalty
            row.frequency, row.presence = params.frequency_penalty, params.presence_penalty
        return row

    def batch(self, rows: Any, rejected: Ids, pool: int | None = None) -> Batch:
        """The arguments of `sample_batch`. They point to an array of rows, to `rejected` and to this object's memory.

        `rejected`: `NOTHING_REJECTED` for each sequence. `pool`: address of another library's pool to run on.
        """
        threads = torch.get_num_threads()
        size = threads * self.library.workspace_floats(c_int64(self.outputs))
        if size > len(self._workspace):
            self._workspace = np.empty(size, np.float32)
        return Batch(
            rows=rows,
            num_rows=len(rows),
            outputs=self.outputs,
            vocabulary=self.vocab_size,
            threads=threads,
            workspace=self._workspace.ctypes.data,
            pool=pool,
            token_ids=self._token_ids.ctypes.data,
            outputs_of=self._outputs_of.ctypes.data,
            runs=self._runs.ctypes.data,
            rejected=rejected.ctypes.data,
        )


def point_to_changes(row: Row, changes: Changes | None) -> None:
    """Point a row to its changes, which must outlive it."""
    if changes is None:
        return
    row.num_biases, row.num_masked = len(changes.bias_ids), len(changes.masked_ids)
    row.num_counted = len(changes.counted_ids)
    for name in ("bias_ids", "biases", "masked_ids", "allowed", "counted_ids", "counts"):
        numbers = getattr(changes, name)
        if numbers is not None and len(numbers):  # reading an address takes a microsecond
            setattr(row, name, numbers.ctypes.data)


def noise(library: ctypes.CDLL, seed: int, position: int, count: int) -> NDArray[np.float32]:
    """Noise and its upper bounds [2, n] of the first n tokens, at least `count`."""
    token_ids = np.arange(round_up(count, BLOCK), dtype=np.int32)
    found = np.empty((2, len(token_ids)), np.float32)
    addresses = [c_void_p(array.ctypes.data) for array in (token_ids, *found)]
    keys = map(c_int32, noise_keys(seed, position))
    library.noise(c_int64(len(token_ids)), addresses[0], *keys, *addresses[1:])
    return found


class _Top:
    """The most probable tokens of a sequence's rows."""

    def __init__(self, sequence: SequenceRows) -> None:
        self._sequence = sequence
        self.count = -1 if sequence.num_logprobs is None else sequence.num_logprobs
        size = sequence.count * max(0, self.count)
        self._token_ids, self._logprobs = np.empty(size, np.uint32), np.empty(size, np.float32)

    def point(self, row: Row, position: int) -> None:
        """Let a row write to its part."""
        if self.count > 0:
            offset = position * self.count * 4
            row.top_ids, row.top_logprobs = self._token_ids.ctypes.data + offset, self._logprobs.ctypes.data + offset

    def chosen(self, rows: Sequence[Any]) -> Chosen:
        """The tokens of the sequence, from its rows."""
        token_ids = self._sequence.accepted(row.token for row in rows)
        kept = rows[: len(token_ids)]
        finite = all(row.is_finite for row in kept)
        if self.count < 0:
            return Chosen(token_ids, finite)
        end = len(kept) * self.count
        packed = Logprobs(
            self.count,
            array("f", [row.logprob for row in kept]),
            _packed("I", self._token_ids[:end]),
            _packed("f", self._logprobs[:end]),
        )
        return Chosen(token_ids, finite, packed)


def _packed(code: str, numbers: NDArray[Any]) -> Any:
    packed = array(code)
    packed.frombytes(numbers.tobytes())
    return packed


@cache
def compile_sampler() -> ctypes.CDLL | None:
    """Compile the library; None if this machine cannot."""
    library = compile_library("sampling", SOURCES, flags=FLAGS)
    if library is not None:
        library.workspace_floats.restype = c_int64
    return library
