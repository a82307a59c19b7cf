"""Run the GPU pass on a CPU: with interpreted kernels, or with torch operations in their place."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import load_engine, random_tokens, transformers_logits
from torch.nn.functional import linear

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.checkpoints import NONE, Segment
from specpool.engine.cache.spans import Span
from specpool.engine.passes.gpu import attention, branches, draft_loop, gemm, inputs, layers, model
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.choice import REMAINING, SEGMENTS, SIZES
from specpool.engine.passes.gpu.graphs import Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.passes.gpu.rows import Addend, Recorder
from specpool.engine.passes.kinds import FULL_ATTENTION, SILU, Activation, AttentionKind
from specpool.engine.passes.modules import activated
from specpool.engine.passes.packing import INPUT_IDS, POSITIONS, SLOTS
from specpool.engine.passes.rotary import rotate
from specpool.engine.probes import kernels
from specpool.engine.run import device_round
from specpool.engine.run import pass_selection as forward
from specpool.engine.run.engine import Engine
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.kernel import CONTEXT_LENGTH
from specpool.engine.sampling.sampler import choose_token
from specpool.engine.startup import loading as startup
from specpool.engine.startup import self_test
from specpool.protocol.sampling import SamplingParams


def run_by_kernels(patch: pytest.MonkeyPatch) -> None:
    """Make engines run the GPU kernels on any device. The interpreter is slow, so self-tests run few passes."""
    patch.setattr(forward, "runs_kernels", lambda device: True)
    patch.setattr(forward, "why_no_kernels", lambda fused: None)  # raise instead of falling back
    patch.setattr(forward, "CudaGraphs", lambda: None)
    patch.setattr(forward, "choose_gemms", lambda *_: True)
    patch.setattr(attention, "BUSY_PROGRAMS", 8)
    patch.setattr(kernels, "POSITIONS", (20,))
    patch.setattr(self_test, "LONG_PASSES", (20,))
    patch.setattr(self_test, "LONG_PROMPTS", ())
    patch.setattr(self_test, "PROBED_PASSES", (1,))
    patch.setattr(startup, "measure_step_times", lambda _: {})
    patch.setattr(startup, "measure_seconds_per_cached", lambda _: 0.0)


def load_by_kernels(patch: pytest.MonkeyPatch, folder: Path, max_model_len: int) -> Engine:
    """Return an engine of three slots that runs the GPU kernels, with pages in random order."""
    run_by_kernels(patch)
    engine = load_engine(folder, False, native=False, cuda_graphs=False, max_sequences=3, max_model_len=max_model_len)
    assert isinstance(engine.forward_pass, GpuModel)
    assert not engine.notes
    shuffle_pages(engine)
    return engine


def shuffle_pages(engine: Engine) -> None:
    """Make sequences take pages in random order."""
    random.Random(0).shuffle(engine.slots.tables.pool._unused)


def check_against_transformers(engine: Engine, folder: Path, tolerance: float) -> torch.Tensor:
    """Compare the logits of a prompt, beside another one, with those of transformers. Return the prompt's."""
    tokens = random_tokens(20)
    together = engine.forward([Span(2, 0, tokens, 20), Span(0, 0, tokens[:3], 1)])
    expected = transformers_logits(folder, tokens)
    torch.testing.assert_close(together, torch.cat([expected, expected[2:3]]), atol=tolerance, rtol=1e-4)
    assert torch.equal(engine.forward([Span(1, 0, tokens[:3], 1)]), together[20:])
    return together[:20]


def make_dot_batch_invariant(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter add the terms of `tl.dot` in one order.

    It calls BLAS, which on some CPUs adds them in an order that depends on the shape of the tile. Tensor cores do not.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: object, a: Any, b: Any, accumulator: Any, *__: object) -> Any:
        dtype = accumulator.data.dtype
        left, right, summed = a.data.astype(dtype), b.data.astype(dtype), accumulator.data.copy()
        for index in range(left.shape[1]):
            summed += np.multiply.outer(left[:, index], right[index])
        return TensorHandle(summed, accumulator.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)


def imitate_kernels(patch: pytest.MonkeyPatch) -> None:
    """Replace the kernels with torch operations, row by row, for tests of the code around them."""
    run_by_kernels(patch)
    for name in ("attend_pages", "rotate_and_cache", "add_and_norm"):
        patch.setattr(layers, name, globals()[name])
    for name in ("add_and_norm", "cap_logits"):
        patch.setattr(model, name, globals()[name])
    patch.setattr(branches, "activate", activate)
    patch.setattr(inputs, "join", join)
    patch.setattr(kernels, "attend_pages", attend_pages)
    patch.setattr(gemm, "split_k_gemm", split_k_gemm)
    patch.setattr(draft_loop, "choose", choose)
    patch.setattr(device_round, "choose", choose)
    patch.setattr(draft_loop, "kernel_is_exact", lambda *_: True)


class FakeGraphs:
    """Stands in for `CudaGraphs`: replays work on the memory that it was captured with, and counts."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        self.captured += 1
        result = run()

        def replay() -> None:
            self.replayed += 1
            result.copy_(run())

        return replay, result


class StaleGraphs(FakeGraphs):
    """Replays leave the result of the capture."""

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        self.captured += 1
        return lambda: None, run()


def imitate_graphs(patch: pytest.MonkeyPatch, rows: int | None = None, graphs: FakeGraphs | None = None) -> FakeGraphs:
    """Imitate kernels and CUDA graphs. `rows`: limit of captured passes, if not that of a GPU. Return the graphs."""
    imitate_kernels(patch)
    fake = graphs or FakeGraphs()
    patch.setattr(forward, "CudaGraphs", lambda: fake)
    if rows is not None:
        patch.setattr(CapturedModel, "captured_rows", rows)
    return fake


def split_k_gemm(x: torch.Tensor, weight: torch.Tensor, split_k: int) -> torch.Tensor:
    return torch.cat([linear(row, weight) for row in x.split(1)])[None]


def join(
    token_ids: torch.Tensor, embedding: torch.Tensor, scale: float, states: torch.Tensor, norms: torch.Tensor | None,
    residual: torch.Tensor, kind: str, eps: float,
) -> torch.Tensor:  # fmt: skip
    joined = torch.stack([states, embedding[token_ids] * scale], 1)
    normed = joined if norms is None else _normed(joined, norms, eps)
    kept = {"zeros": torch.zeros_like(states), "states": states, "normed": normed[:, 0]}
    residual.copy_(kept[kind])
    return normed.flatten(1)


def add_and_norm(
    hidden: torch.Tensor,
    added: Addend | None,
    weight: torch.Tensor | None,
    eps: float,
    recorder: Recorder | None = None,
) -> torch.Tensor:
    if added is not None:
        branch = _summed(added.partials, added.bias)
        hidden += branch if added.norm is None else _normed(branch, added.norm, eps)
    if recorder is not None and (slot := recorder.slots[recorder.num_layers]) >= 0:
        recorder.states[:, slot] = hidden
    return hidden if weight is None else _normed(hidden, weight, eps)


def rotate_and_cache(
    partials: torch.Tensor, bias: torch.Tensor | None, norms: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor], arena: KVArena, layer: int, positions: torch.Tensor,
    slots: torch.Tensor, offsets: torch.Tensor, heads: int, eps: float,
) -> torch.Tensor:  # fmt: skip
    kv_heads, _, dim = arena.keys[layer].shape
    features = _summed(partials, bias).unflatten(-1, (-1, dim))[:, : heads + 2 * kv_heads]
    query_key, value = features.split([heads + kv_heads, kv_heads], 1)
    if norms is not None:
        query_key = _normed(query_key, norms, eps)
    rotated = rotate(query_key, *(table[positions, None] for table in rotary))
    cached = slots >= 0
    columns = _columns(arena, slots[cached], (positions + offsets)[cached])
    arena.write(layer, columns, rotated[cached, heads:], value[cached])
    return rotated[:, :heads].contiguous()


def attend_pages(
    query: torch.Tensor, arena: KVArena, layer: int, tile_begins: torch.Tensor, tile_sizes: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, prefix_lengths: torch.Tensor, offsets: torch.Tensor,
    scaling: float, splits: int, kind: AttentionKind = FULL_ATTENTION,
) -> torch.Tensor:  # fmt: skip
    groups = query.shape[1] // len(arena.keys[layer])
    for begin, size in zip(tile_begins.tolist(), tile_sizes.tolist(), strict=True):
        for row in range(begin, begin + size):
            end = int(positions[row]) + 1
            seen = torch.arange(0 if kind.window is None else max(0, end - kind.window), end)
            seen += torch.where(seen < prefix_lengths[row], 0, offsets[row])
            columns = _columns(arena, slots[row], seen)
            caches = (arena.keys[layer], arena.values[layer])
            k, v = (cache[:, columns].repeat_interleave(groups, 0) for cache in caches)
            query[row, :, : v.shape[2]] = attended_row(query[row], k, v, scaling, kind)
    return query[..., : arena.latent_rank].contiguous()


def attended_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, kind: AttentionKind
) -> torch.Tensor:
    """Attend with one row [heads, dim] to all keys and values [heads, columns, dim], in any dtype."""
    scores = query[:, None] @ keys.mT * scaling
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    if kind.sinks is not None:
        scores = torch.cat([scores, kind.sinks.to(scores)[:, None, None]], -1)
    return (scores.softmax(-1)[..., : keys.shape[1]] @ values)[:, 0]


def activate(
    partials: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, activation: Activation = SILU
) -> torch.Tensor:
    return torch.cat([activated(row, activation) for row in _summed(partials, bias).split(1)])


def cap_logits(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    return torch.cat([softcap * torch.tanh(row / softcap) for row in logits.split(1)])


def choose(
    logits: torch.Tensor,
    head: Head,
    numbers: torch.Tensor | None = None,
    rules: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    largest, outputs = logits.float().max(-1)
    token_ids, probabilities = head.token_ids(outputs), (largest - logits.float().logsumexp(-1)).exp()
    if rules is not None:
        for row, (own, known) in enumerate(zip(rules, head.over_vocabulary(logits), strict=False)):
            if (params := params_of(own)).temperature > 0:
                token_ids[row] = choose_token(known, params, range(int(own[CONTEXT_LENGTH])))
                probabilities[row] = 1.0 if known.max().isfinite() else math.nan
        rules[:, CONTEXT_LENGTH] += 1
    if numbers is not None:
        numbers[REMAINING] -= 1
        alive = numbers[REMAINING] > 0
        numbers[INPUT_IDS] = token_ids
        numbers[POSITIONS] += alive
        numbers[SLOTS] = torch.where(alive, numbers[SLOTS], -1)
        numbers[SIZES] = alive.long()
        for row, own in enumerate(numbers[SEGMENTS:REMAINING].reshape(-1, len(Segment._fields))):
            first_row, _, start, *read, write, write_position, write_tail = own.tolist()
            read = read if write == NONE else [write, write_position, write_tail]
            start = start + 1 if alive[row] else read[1]
            own[:] = torch.tensor([first_row, alive[row], start, *read, NONE, write_position, write_tail])
    if chosen is None:
        chosen = torch.empty(2, len(logits), dtype=torch.float64)
    chosen[0], chosen[1] = token_ids, probabilities
    return chosen


def params_of(rules: torch.Tensor) -> SamplingParams:
    """The parameters that `numbers_of_row` encodes."""
    temperature, top_p, log_min_p = rules[:3].view(torch.float32).tolist()
    top_k, low, high = rules[3:6].tolist()
    seed = (high % 2**32 << 32) + low % 2**32
    return SamplingParams(temperature, top_p=top_p, min_p=math.exp(log_min_p), top_k=top_k, seed=seed)


def _columns(arena: KVArena, slots: torch.Tensor, logical: torch.Tensor) -> torch.Tensor:
    return arena.tables[slots, logical // arena.page_size].long() * arena.page_size + logical % arena.page_size


def _summed(partials: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return partials.sum(0) if bias is None else partials.sum(0) + bias


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
