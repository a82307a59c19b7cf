"""What a launch moves and computes, from its own arguments: no rule of the engine is repeated here."""

from dataclasses import dataclass

import torch

from benchmarks.gpu.launches import GATHERING, Launch, Step

PARTIALS = torch.float32.itemsize
# The launch of a GEMM by cuBLAS.
CUBLAS = "torch mm"


@dataclass(frozen=True)
class Traffic:
    """Bytes and operations of a launch."""

    once: int
    """Bytes of weights and cache, each counted once: no kernel can avoid them."""
    spilled: int
    """Bytes of activations that do not fit into the L2 cache."""
    l2: int
    """Bytes that programs load and store."""
    flop: int = 0
    """Of whole tiles, padding included."""
    needed_flop: int = 0
    programs: int = 1
    """Programs with work."""
    chain: int = 0
    """Tiles of inputs, or blocks of positions, that a program handles one after the other."""
    blocks: int = 0
    """Blocks of positions that all programs handle, in attention."""


def traffic_of(launch: Launch, step: Step, cached: int, l2_bytes: int) -> Traffic:
    """The traffic of a launch. `l2_bytes`: larger tensors do not stay in the L2 cache."""
    if "TILE_N" in launch.arguments:
        return gemm(launch, l2_bytes)
    if "HEIGHT" in launch.arguments:
        return attend(launch, step, cached, l2_bytes)
    if launch.name == CUBLAS:
        return cublas(launch, l2_bytes)
    return rows(launch, step, l2_bytes)


def gemm(launch: Launch, l2_bytes: int) -> Traffic:
    """Each tile loads its part of the weight and its rows. Padding rows are masked, so they only cost operations."""
    given = launch.arguments
    weight, outputs, inputs, count = given["weight"], given["N"], given["K"], given["rows"]
    row_tiles, output_tiles = -(-count // given["TILE_ROWS"]), -(-outputs // given["TILE_N"])
    written = given["partials"].nbytes
    return Traffic(
        once=weight.nbytes,
        spilled=spill(written, l2_bytes),
        l2=row_tiles * weight.nbytes + output_tiles * given["x"].nbytes + written,
        flop=2 * row_tiles * given["TILE_ROWS"] * output_tiles * given["TILE_N"] * inputs,
        needed_flop=2 * count * outputs * inputs,
        programs=launch.programs,
        chain=-(-given["SPLIT_K"] // given["TILE_K"]),
    )


def attend(launch: Launch, step: Step, cached: int, l2_bytes: int) -> Traffic:
    """Each tile loads all keys and values of its sequence and KV head. Tiles of padding end at once."""
    given = launch.arguments
    heads, groups, dim, height, block = (given[name] for name in ("HEADS", "GROUPS", "DIM", "HEIGHT", "BLOCK"))
    kv_heads, size, length = heads // groups, given["keys"].itemsize, cached + step.new_tokens
    tiles = step.sequences * -(-step.new_tokens // (height // groups)) * kv_heads
    splits = 1 if given["SERIAL"] else -(-length // given["SPLIT"])
    keys_and_values = 2 * length * dim * size
    queries = 2 * given["query"].nbytes
    partials = 0 if given["SERIAL"] else step.sequences * step.new_tokens * splits * heads * (dim + 2) * PARTIALS
    blocks = -(-length // block)
    return Traffic(
        once=step.sequences * kv_heads * keys_and_values,
        spilled=spill(partials, l2_bytes),
        l2=tiles * keys_and_values + queries + partials,
        flop=4 * tiles * height * given["WIDTH"] * blocks * block,
        needed_flop=4 * step.sequences * step.new_tokens * length * heads * dim,
        programs=tiles * splits,
        chain=blocks if given["SERIAL"] else -(-min(length, given["SPLIT"]) // block),
        blocks=tiles * blocks,
    )


def cublas(launch: Launch, l2_bytes: int) -> Traffic:
    """cuBLAS's tiles are unknown: every matrix counts once."""
    (x, weight, *_), (output,) = launch.arguments["inputs"], launch.arguments["outputs"]
    flop = 2 * len(x) * weight.numel()
    moved = x.nbytes + weight.nbytes + output.nbytes
    spilled = spill(output.nbytes, l2_bytes)
    return Traffic(weight.nbytes, spilled, moved, flop, needed_flop=flop, programs=launch.programs)


def rows(launch: Launch, step: Step, l2_bytes: int) -> Traffic:
    """Any other kernel moves its tensors once, and of the cache the new positions."""
    given, tensors = launch.arguments, launch.tensors
    if launch.name.removeprefix("torch ") in GATHERING:
        tensors = given["outputs"] * 2
    cache = [given[name] for name in ("keys", "values") if name in given]
    written = sum(step.sequences * step.new_tokens * each.nbytes // each.shape[1] for each in cache)
    sizes = [tensor.nbytes for tensor in tensors if all(tensor is not each for each in cache)]
    spilled = sum(spill(size, l2_bytes) for size in sizes)
    return Traffic(once=written, spilled=spilled, l2=sum(sizes) + written, programs=launch.programs)


def spill(size: int, l2_bytes: int) -> int:
    """Bytes of a tensor that pass through HBM."""
    return size if size > l2_bytes else 0
