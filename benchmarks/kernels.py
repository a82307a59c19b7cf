"""Compiles the GPU kernels without a GPU, and reports registers, spills, shared memory and kernels per layer.

    python -m benchmarks.kernels [--archs 80 90 100] [--dtypes bfloat16 float16 float32] [--shapes qwen3-8b ...]
        [--ranks 1 4 8 --sums whole parts] [--quick]

Passes of a model of each shape run on torch's meta device, with a Triton driver that compiles kernels instead of
launching them. With several ranks, the last one runs: it has the smallest shard. Prints JSON as the
last line.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from triton.backends.compiler import GPUTarget

from benchmarks.report import finish, output_folder, progress, show
from benchmarks.shapes import (
    HEAD_SHAPES,
    HYBRID_SHAPES,
    LATENT_SHAPES,
    MIXTURE_SHAPES,
    SHAPES,
    SHORT_CONV_SHAPES,
    random_head,
)
from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.checkpoints import NONE, Segment
from specpool.engine.cache.layout import GPU_PAGE_SIZE
from specpool.engine.cache.recurrent import RecurrentArena, tail_rows
from specpool.engine.cache.spans import Span
from specpool.engine.config.architectures import FEATURES, RECURRENT_LAYERS
from specpool.engine.config.recurrent_sizes import CHECKPOINTS_PER_SLOT
from specpool.engine.passes.attention import PACKED_ATTENTION
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.gpu.accept import accept
from specpool.engine.passes.gpu.choice import choose, no_numbers
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.passes.packing import PackedBatch, Shape, pack
from specpool.engine.sampling.change_kernel import change_rows
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.kernel import FIELDS, sample_rows
from specpool.engine.sampling.ranking_kernel import rank_greedy
from specpool.engine.sampling.rules import Changes
from specpool.engine.sharding.group import SINGLE_RANK, Group, SingleRank
from specpool.engine.sharding.shares import Share, Sums, piece_of, shard
from specpool.engine.sharding.weights import adapt, cut
from specpool.engine.weights.quantized import as_tensor
from specpool.protocol.sampling import SamplingParams

DTYPES = ("bfloat16", "float16", "float32")
# Maximum bytes of shared memory of a program, by architecture.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# New tokens of each sequence: plain steps, verifications, many sequences, a prompt; at short and long contexts. Their
# numbers of rows (8, 24, 40, 64, 320, 2048) need every tile of the GEMMs.
PASSES = ([1] * 8, [3] * 8, [5] * 8, [1] * 64, [5] * 64, [2048])
CONTEXTS = (128, 4096)
# Longer than any window, because a window of all positions compiles to full attention.
MAX_LENGTH = 8192

_LLAMA = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_act": "silu", "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
# Further head and group sizes of well-known models.
HEADS: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        **_LLAMA, "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama3-70b": {
        **_LLAMA, "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "vicuna-7b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "smollm2-135m": {
        **_LLAMA, "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "glm4-9b": {
        **_LLAMA, "model_type": "glm4", "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "heads of 80": {
        **_LLAMA, "hidden_size": 2560, "intermediate_size": 6912, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "heads of 96": {
        **_LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32,
    },
    "heads of 256": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 256,
    },
}  # fmt: skip
# Windows and soft caps. The first layers of Gemma have a window.
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral-7b-v0.1": {
        **_LLAMA, "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "gemma2-9b": {
        **_LLAMA, "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 3584, "intermediate_size": 14_336,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
    },
    "gemma2-27b": {
        **_LLAMA, "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 4608, "intermediate_size": 36_864,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144,
    },
    "gemma3-4b": {
        "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
        "max_position_embeddings": 32_768,
    },
}  # fmt: skip
ALL_SHAPES: dict[str, dict[str, Any]] = {
    **SHAPES, **HEADS, **WINDOWS, **MIXTURE_SHAPES, **HYBRID_SHAPES, **SHORT_CONV_SHAPES, **LATENT_SHAPES,
    **HEAD_SHAPES,
}  # fmt: skip


Row = dict[str, Any]


@dataclass
class Compiled:
    name: str
    registers: int
    stack: int
    """Bytes that a thread spills to memory."""
    shared: int
    """Bytes of shared memory of a program."""


@dataclass
class Compiler:
    """A Triton driver for a GPU that does not exist: it compiles kernels and counts launches."""

    arch: int
    number: int = field(default_factory=count().__next__)
    compiled: list[Compiled] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)
    fused: bool = False
    """Whether the compiler may fuse multiplications and additions of some kernel."""

    @property
    def utils(self) -> "Compiler":
        return self

    @property
    def launcher_cls(self) -> Callable[..., Callable[..., None]]:
        return self._launcher

    def _launcher(self, source: object, metadata: Any) -> Callable[..., None]:
        self.fused |= metadata.enable_fp_fusion
        return lambda *_: self.launched.append(metadata.name)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """A unique number. Triton then reuses nothing compiled for another device."""
        return self.number

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self.arch], "multiprocessor_count": 132}

    def load_binary(self, name: str, binary: bytes, shared: int, *_: Any) -> tuple[object, Compiled, int, int, int]:
        """Record the resources of a compiled kernel, and return them as its handle."""
        kernel = Compiled(name, *resources(binary), shared)
        self.compiled.append(kernel)
        return self, kernel, kernel.registers, kernel.stack, 1024

    def __hash__(self) -> int:
        return id(self)


def resources(binary: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        output = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", output)}
    return usage["REG"], usage["STACK"]


@contextmanager
def compiling(compiler: Compiler) -> Iterator[Compiler]:
    """Compile kernels with this driver instead of launching them."""
    triton.runtime.driver.set_active(compiler)
    try:
        yield compiler
    finally:
        triton.runtime.driver._active = None  # there was no other driver


class FakeGroup(Group):
    """A group in which only this rank exists."""

    def __init__(self, share: Share) -> None:
        self.rank, self.ranks, self.sharding = share.rank, share.sharding.ranks, share.sharding
        self.in_parts = share.sharding.sums == "parts"
        self._borders = torch.tensor(self.sharding.shares["tokens"].firsts[1:], device="meta")

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The shape of a tensor gathered from all ranks."""
        return x.new_empty(self.ranks, *x.shape)


def model_of(
    shape: dict[str, Any], dtype: torch.dtype, layers: int = 1, ranks: int = 1, sums: Sums = "whole"
) -> GpuModel:
    """A pass of this shape, or of its last rank, on the meta device. Heads are not sharded."""
    sizes = {**shape, "num_hidden_layers": layers}
    if FEATURES in shape:
        return GpuModel(FusedModel(random_head(sizes, "meta", dtype)), MAX_LENGTH)
    if (recurrent := RECURRENT_LAYERS.get(sizes["model_type"])) is not None:  # begin with a layer that attends
        sizes["layer_types"] = [recurrent if layer % 4 else "full_attention" for layer in range(layers)]
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED_ATTENTION)
    group: SingleRank = SINGLE_RANK
    if ranks > 1:
        share = Share(shard(config, ranks, sums), ranks - 1)
        for name, weight in model.named_parameters():
            if (piece := piece_of(name, config, share)) is not None:
                module, kind = name.rsplit(".", 1)
                setattr(
                    model.get_submodule(module), kind, nn.Parameter(as_tensor(cut(weight, piece)), requires_grad=False)
                )
        adapt(model, share)
        group = FakeGroup(share)
    return GpuModel(FusedModel(model, group), MAX_LENGTH, max(map(len, PASSES)))


@torch.inference_mode()
def run(model: GpuModel, tokens: Sequence[int], cached: int, records_states: bool = False) -> None:
    """Run a pass with these new tokens in each sequence, after `cached` cached ones.

    `records_states`: whether it records hidden states, as captured passes do.
    """
    spans = [Span(slot, cached, [0] * count, count if count < 64 else 1) for slot, count in enumerate(tokens)]
    arena = arena_of(model, len(tokens), cached + max(tokens))
    segments = [Segment(0, count, cached, NONE, cached, 0, NONE, 0, 0) for count in tokens] if arena.recurrent else ()
    batch = pack(spans, arena, model.padded_shape, model.rows_per_tile, repeats=False, segments=segments)
    if model.state_size:
        width = model.state_size if model.projection is None else model.projection.in_features
        states = model.project(torch.empty(batch.rows, width, dtype=model.compute_dtype, device="meta"))
        batch = replace(batch, input_states=states, own_states=torch.empty_like(states[: batch.shape.logits]))
    if records_states:
        recorded = torch.empty(batch.rows, 1, model.hidden_size, dtype=torch.bfloat16, device="meta")
        batch = replace(batch, state_layers=(len(model.layers),), states=recorded)
    model(batch)


@torch.inference_mode()
def draft(model: GpuModel, rows: int, cached: int, steps: int) -> None:
    """Run steps of the draft loop, after `cached` cached tokens of each sequence."""
    outputs = model.head.out_features
    head = Head(outputs, torch.empty(outputs, dtype=torch.int64, device="meta"))
    loop = model.draft_loop(arena_of(model, rows, cached + steps), head)
    assert loop is not None
    numbers = no_numbers(rows, model.recurrent_sizes is not None, "meta")
    chosen = torch.empty(2, rows, dtype=torch.float64, device="meta")
    states = torch.empty(rows, model.state_size, dtype=model.compute_dtype, device="meta")
    loop.run_steps(numbers, chosen, cached + steps, steps, states)


def arena_of(model: GpuModel, sequences: int, length: int) -> KVArena:
    """The cache of sequences of this length, on the meta device."""
    pages = -(-length // GPU_PAGE_SIZE)
    columns, tables = sequences * pages * GPU_PAGE_SIZE, (sequences, pages)
    dtype, device, recurrent = model.compute_dtype, torch.device("meta"), None
    if model.recurrent_sizes is not None:
        entries, rows = CHECKPOINTS_PER_SLOT * sequences, tail_rows(GPU_PAGE_SIZE)
        recurrent = RecurrentArena(model.recurrent_sizes, entries, sequences, rows, dtype, device)
    layers = len(model.layers) - (0 if recurrent is None else recurrent.sizes.layers)
    return KVArena(
        layers, model.kv_heads, columns, model.head_dim, dtype, device, tables, GPU_PAGE_SIZE, recurrent,
        model.latent_rank,
    )  # fmt: skip


def sample(vocab_size: int, dtype: torch.dtype) -> None:
    """Choose and rank tokens of either kind of head in a draft, and sample without and with penalties."""
    params = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)
    logits = torch.empty(1, vocab_size, dtype=dtype, device="meta")
    numbers = no_numbers(1, recurs=False, device="meta")
    rules = torch.empty(1, FIELDS, dtype=torch.int32, device="meta")
    output_ids = torch.empty(vocab_size, dtype=torch.int64, device="meta")
    for head, of_row in product((Head(vocab_size), Head(vocab_size, output_ids)), (None, rules)):
        choose(logits, head, rules=of_row)
        choose(logits, head, numbers, of_row)
        rank_greedy(logits, head, 2)
    for changed in (None, change_rows(logits, [(params, Changes())])):
        with suppress(NotImplementedError):  # the meta device has no memory to read the token from
            sample_rows(logits, [(params, 1)], changed)


def accept_drafts(model: GpuModel) -> None:
    """Accept draft tokens of a sequence."""
    batch = PackedBatch.of_padding(arena_of(model, 1, 1), Shape(8, 8, 8), 1)
    numbers = no_numbers(8, recurs=False, device="meta")
    accept(torch.empty(2, 8, dtype=torch.float64, device="meta"), batch, batch, numbers, 1, model.rows_per_tile)


def measure(
    arch: int, dtype: str, shape: str, ranks: int = 1, sums: Sums = "whole", passes: Sequence[list[int]] = PASSES
) -> Row:
    """The resources of the kernels of a shape's passes."""
    with compiling(Compiler(arch)) as compiler:
        one, two = (model_of(ALL_SHAPES[shape], getattr(torch, dtype), layers, ranks, sums) for layers in (1, 2))
        launches, step = {1: 0, 2: 0}, dict[str, int]()
        for tokens, cached, records_states in product(passes, CONTEXTS, (False, True)):
            run(two, tokens, cached, records_states)  # the layers of a model may differ
        for layers, model in ((1, one), (2, two)):
            before = len(compiler.launched)
            run(model, passes[0], CONTEXTS[-1])
            launches[layers] = len(compiler.launched) - before
        if FEATURES in ALL_SHAPES[shape]:
            before = len(compiler.launched)
            draft(one, len(passes[0]), CONTEXTS[0], steps=1)
            step = {"kernels_a_step": len(compiler.launched) - before}
        else:
            if one.recurrent_sizes is not None:
                draft(two, len(passes[0]), CONTEXTS[0], steps=1)
            sample(ALL_SHAPES[shape]["vocab_size"], getattr(torch, dtype))
            accept_drafts(one)
    names = sorted({kernel.name for kernel in compiler.compiled})
    return {
        "sm": arch, "dtype": dtype, "shape": shape, "ranks": ranks, "sums": sums if ranks > 1 else "",
        "kernels_a_layer": launches[2] - launches[1], **step,
        "fused": compiler.fused, "shared_limit": SHARED[arch],
        "kernels": [maximum(name, [each for each in compiler.compiled if each.name == name]) for name in names],
    }  # fmt: skip


def maximum(name: str, variants: Sequence[Compiled]) -> Row:
    """The maximum resources of any variant of a kernel."""
    return {
        "kernel": name.strip("_"), "variants": len(variants), "registers": max(each.registers for each in variants),
        "spilled_bytes": max(each.stack for each in variants), "shared_bytes": max(each.shared for each in variants),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", type=int, nargs="+", choices=SHARED, default=list(SHARED), help="80 is sm_80")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--shapes", nargs="+", choices=ALL_SHAPES, default=list(ALL_SHAPES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of sharded models")
    parser.add_argument("--sums", nargs="+", choices=get_args(Sums), default=list(get_args(Sums)))
    parser.add_argument("--quick", action="store_true", help="plain steps only")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    divisions = [(ranks, sums) for ranks in options.ranks for sums in options.sums[: None if ranks > 1 else 1]]
    cells = list(product(options.archs, options.dtypes, options.shapes, divisions))
    passes = PASSES[:1] if options.quick else PASSES
    rows = [
        measure(arch, dtype, shape, ranks, sums, passes)
        for arch, dtype, shape, (ranks, sums) in progress(cells, "compiling")
    ]
    for row in rows:
        step = f", {row['kernels_a_step']} a draft step" if "kernels_a_step" in row else ""
        show(
            f"{row['shape']}, {row['dtype']}, sm_{row['sm']}, ranks: {row['ranks']} {row['sums']}: "
            f"{row['kernels_a_layer']} kernels a layer{step}",
            row["kernels"],
        )
    finish("kernels", {"triton": triton.__version__, "passes": rows}, options.output)


if __name__ == "__main__":
    main()
