"""Bytes and operations of a launch, from its arguments alone, so that no rule of the engine is repeated here."""

from dataclasses import dataclass
from math import prod

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.launches import GATHERING, Launch
from specpool.engine.numerics.tiles import round_up

PARTIALS = torch.float32.itemsize


@dataclass(frozen=True)
class Traffic:
    """Bytes and operations of a launch."""

    once: int  # bytes of weights and cache, each counted once
    spilled: int  # bytes of activations that do not fit into the L2 cache
    l2: int  # bytes that programs load and store
    flop: int = 0  # of whole tiles, padding included
    needed_flop: int = 0
    programs: int = 1  # with work
    chain: int = 0  # tiles of inputs, or blocks of positions, that a program handles one after the other
    blocks: int = 0  # blocks of positions that all programs handle, in attention
    scanned: int = 0  # rows that a program handles one after the other, in a recurrence


def traffic_of(launch: Launch, l2_bytes: int) -> Traffic:
    """The traffic of a launch. `l2_bytes`: larger tensors do not stay in the L2 cache."""
    if (own := {"scan": _scan, "convolve": _convolve, "grouped_gemm": _grouped_gemm}.get(launch.name)) is not None:
        return own(launch, l2_bytes)
    if "TILE_N" in launch.arguments:
        return _gemm(launch, l2_bytes)
    if "HEIGHT" in launch.arguments:
        return _attend(launch, l2_bytes)
    return (_cublas if launch.name == "torch mm" else _rows)(launch, l2_bytes)


def _gemm(launch: Launch, l2_bytes: int) -> Traffic:
    """Each tile loads its part of the weight and its rows. Padding rows are masked, so they only cost operations.

    A head may have its own weight and inputs.
    """
    given = launch.arguments
    weight, outputs, inputs, count = given["weight"], given["N"], given["K"], given["rows"]
    row_tiles, output_tiles = -(-count // given["TILE_ROWS"]), -(-outputs // given["TILE_N"])
    heads = given.get("HEADS", 1)
    written = count * heads * outputs * given["results"].itemsize if "results" in given else given["partials"].nbytes
    return Traffic(
        once=weight.nbytes,
        spilled=_spill(written, l2_bytes),
        l2=row_tiles * weight.nbytes + output_tiles * given["x"].nbytes + written,
        flop=2 * row_tiles * given["TILE_ROWS"] * heads * output_tiles * given["TILE_N"] * inputs,
        needed_flop=2 * count * heads * outputs * inputs,
        programs=prod(launch.grid),
        chain=-(-given.get("SPLIT_K", inputs) // given["TILE_K"]),
    )


def _attend(launch: Launch, l2_bytes: int) -> Traffic:
    """Each tile loads all keys and values of its sequence and KV head. Tiles of padding end at once.

    With latent attention, a tile has a block of heads, and the values are the first features of its only KV head.
    """
    given, work = launch.arguments, launch.work
    heads, groups, dim, height, block = (given[name] for name in ("HEADS", "GROUPS", "DIM", "HEIGHT", "BLOCK"))
    kv_heads, size, length = len(given["keys"]), given["keys"].itemsize, work.cached + work.tokens
    tiles = work.sequences * -(-work.tokens // (height // groups)) * -(-heads // groups)
    splits = 1 if given["SERIAL"] else -(-length // given["SPLIT"])
    keys_and_values = length * (dim + (given["ROTARY"] or dim)) * size
    partials = 0 if given["SERIAL"] else work.sequences * work.tokens * splits * heads * (dim + 2) * PARTIALS
    blocks = -(-length // block)
    return Traffic(
        once=work.sequences * kv_heads * keys_and_values,
        spilled=_spill(partials, l2_bytes),
        l2=tiles * keys_and_values + given["query"].nbytes + given["attended"].nbytes + partials,
        flop=2 * tiles * height * (2 * given["WIDTH"] + given["ROTARY_WIDTH"]) * blocks * block,
        needed_flop=2 * work.sequences * work.tokens * length * heads * (2 * dim + given["ROTARY"]),
        programs=tiles * splits,
        chain=blocks if given["SERIAL"] else -(-min(length, given["SPLIT"]) // block),
        blocks=tiles * blocks,
    )


def _grouped_gemm(launch: Launch, l2_bytes: int) -> Traffic:
    """Rows choose experts at random, padding chooses none, and only chosen experts are read."""
    given, rows = launch.arguments, launch.work.sequences * launch.work.tokens
    (experts, outputs, inputs), written = given["weight"].shape, given["partials"].nbytes
    choices = given["choices"] * rows // round_up(rows, 8)
    chosen = round(experts * (1 - (1 - 1 / experts) ** choices))
    row_tiles, output_tiles = chosen + choices // given["TILE_ROWS"], -(-outputs // given["TILE_N"])
    weight = outputs * inputs * given["weight"].itemsize
    return Traffic(
        once=chosen * weight,
        spilled=_spill(written, l2_bytes),
        l2=row_tiles * weight + output_tiles * choices * inputs * given["x"].itemsize + written,
        flop=2 * row_tiles * given["TILE_ROWS"] * output_tiles * given["TILE_N"] * inputs,
        needed_flop=2 * choices * outputs * inputs,
        programs=row_tiles * prod(launch.grid[1:]),
        chain=-(-given["SPLIT_K"] // given["TILE_K"]),
    )


def _scan(launch: Launch, l2_bytes: int) -> Traffic:
    """Each program reads and writes some columns of a state, and loads queries, keys and values of every row."""
    given, work, programs = launch.arguments, launch.work, launch.work.sequences * prod(launch.grid[1:])
    states = 2 * work.sequences * given["states"][0].nbytes
    loaded = programs * work.scanned * (2 * given["KEY"] + given["BLOCK"]) * PARTIALS
    spilled = _spill(given["results"].nbytes, l2_bytes)
    return Traffic(states, spilled, states + loaded + given["results"].nbytes, programs=programs, scanned=work.scanned)


def _convolve(launch: Launch, l2_bytes: int) -> Traffic:
    """Each row loads the inputs of all taps. The inputs of new rows in tails stay in memory."""
    given, work, features = launch.arguments, launch.work, launch.arguments["prepared"].shape[1]
    rows, size = work.sequences * work.scanned, given["inputs"].itemsize
    kept = work.sequences * min(work.tokens, given["TAIL_ROWS"]) * features * size
    prepared, tiles = rows * features * PARTIALS, -(-work.scanned // given["TILE"])
    programs = work.sequences * launch.grid[1] * min(launch.grid[2], tiles)
    moved = rows * given["TAPS"] * features * size + prepared + kept
    return Traffic(kept, _spill(prepared, l2_bytes), moved, programs=programs)


def _cublas(launch: Launch, l2_bytes: int) -> Traffic:
    """cuBLAS's tiles are unknown: every matrix counts once."""
    (x, weight, *_), (output,) = launch.arguments["inputs"], launch.arguments["outputs"]
    flop, moved = 2 * len(x) * weight.numel(), x.nbytes + weight.nbytes + output.nbytes
    return Traffic(weight.nbytes, _spill(output.nbytes, l2_bytes), moved, flop, flop, prod(launch.grid))


def _rows(launch: Launch, l2_bytes: int) -> Traffic:
    """Any other kernel moves its tensors once, but only new positions of the cache, and hardly any of an embedding."""
    given, work = launch.arguments, launch.work
    gathers = launch.name.removeprefix("torch ") in GATHERING
    found = given["outputs"] if gathers else tree_leaves({**given, "keys": 0, "values": 0, "embedding": 0})
    sizes = {id(each): each.nbytes for each in found if isinstance(each, torch.Tensor)}.values()
    cache = [given[name] for name in ("keys", "values") if name in given]
    written = sum(work.sequences * work.tokens * each.nbytes // each.shape[1] for each in cache)
    spilled = sum(_spill(size, l2_bytes) for size in sizes)
    return Traffic(once=written, spilled=spilled, l2=sum(sizes) + written, programs=prod(launch.grid))


def _spill(size: int, l2_bytes: int) -> int:
    """Bytes of a tensor that pass through HBM."""
    return size if size > l2_bytes else 0
