"""Attention over the pages of sequences on a GPU: splits of fixed length, combined in order (flash-decoding).

Consecutive rows of a sequence share a tile with all query heads of a KV head, so keys and values are read once for
them. A row's bits depend only on its positions, not on where its pages lie: splits and blocks start at fixed
positions, and a block that a row does not see adds exactly zero. A tile skips blocks that end before the window of its
first row.

With latent attention, all query heads attend to one cached head, in blocks of heads. A key is loaded once: its first
features are the value, too.
"""

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.numerics.triton_compat import (
    HOPPER,
    architecture,
    is_wide,
    launch_options,
    power_of_two,
    triton,
)
from specpool.engine.passes.kinds import FULL_ATTENTION, AttentionKind

if triton is not None:
    from specpool.engine.passes.gpu.attention_kernels import attend, combine_splits

# Positions per split, and positions loaded at a time. Splits are combined in order. A block inside one page needs a
# single page table entry; any other block looks up each position.
SPLIT, BLOCK = 256, 64
# Elements of a head's keys that the kernel can address.
MAX_ELEMENTS = 2**31
# Programs that keep a GPU busy. From here on, one program handles all splits of a tile, which saves a kernel. Below,
# several programs of a tile take turns with its splits, so their number does not depend on lengths of sequences.
BUSY_PROGRAMS = 512
# Maximum size of the partial results of small heads. They grow with rows times splits, so above this size, too, one
# program handles all splits.
MAX_PARTIAL_BYTES = 2**29
# Larger heads need too many registers for one program to accumulate all splits.
MAX_SERIAL_WIDTH = 128
# With latent attention: query rows of a tile, counting each head. More would spill registers.
LATENT_HEIGHT = 16


def num_splits(length: int) -> int:
    """Splits of sequences of up to `length` positions, rounded up to a power of two to keep shapes few."""
    return power_of_two(-(-length // SPLIT))


def visible_splits(splits: int, window: int | None) -> int:
    """Maximum number of splits that a tile of up to SPLIT rows sees, out of the `splits` of its sequence."""
    return splits if window is None else min(splits, 2 - (1 - window) // SPLIT)


def tile_height(dtype: torch.dtype, groups: int) -> int:
    """Query rows of a tile, counting each head. `groups`: query heads per KV head."""
    # sm_90 tensor cores multiply 64 rows at a time; float32 does not use them and is limited by registers.
    return max(16 if is_wide(dtype) else 64, power_of_two(groups))


def rows_per_tile(dtype: torch.dtype, groups: int, is_latent: bool = False) -> int:
    """Maximum rows of a sequence that share a tile."""
    return LATENT_HEIGHT // -(-groups // head_blocks(groups)) if is_latent else tile_height(dtype, groups) // groups


def head_blocks(heads: int) -> int:
    """Blocks of query heads that share a tile's rows with latent attention."""
    return -(-heads // LATENT_HEIGHT)


def attend_pages(
    query: torch.Tensor,  # [rows, heads, dim]; overwritten by the result, unless attention is latent
    arena: KVArena,
    layer: int,
    tile_begins: torch.Tensor,  # [tiles] first row
    tile_sizes: torch.Tensor,  # [tiles] number of rows, at consecutive positions of one span; 0: no rows
    positions: torch.Tensor,  # [rows]
    slots: torch.Tensor,  # [rows]; -1: padding
    prefix_lengths: torch.Tensor,  # [rows] positions before the row's branch
    offsets: torch.Tensor,  # [rows] shift of later positions to the right, in logical columns
    scaling: float,
    splits: int,
    kind: AttentionKind = FULL_ATTENTION,
    warps: int | None = None,
) -> torch.Tensor:
    """Attend from every row in a tile to positions up to its own. Return the result [rows, heads, features of a value].

    It replaces `query`, unless attention is latent.
    """
    (rows, heads, key_dim), is_latent = query.shape, arena.latent_rank is not None
    keys, values, tables = arena.keys[layer], arena.values[layer], arena.tables
    (kv_heads, columns, _), dim = keys.shape, values.shape[2]
    assert columns * key_dim <= MAX_ELEMENTS, "the cache has more columns than attention can address"
    blocks = head_blocks(heads) if is_latent else kv_heads
    groups, width, rotary = -(-heads // blocks), power_of_two(dim), key_dim - dim
    shape = {"HEADS": heads, "GROUPS": groups, "DIM": dim, "WIDTH": width, "SPLIT": SPLIT,
             "WINDOW": kind.window or 0, "SINKS": kind.sinks is not None}  # fmt: skip
    options, sinks = launch_options(query.device), query if kind.sinks is None else kind.sinks
    tiles, splits = len(tile_begins), visible_splits(splits, kind.window)
    is_short = splits == 1 or (kind.window is not None and kind.window <= SPLIT)
    serial = _can_be_serial(dim, is_latent) and (
        is_short or tiles * blocks >= BUSY_PROGRAMS or _partial_bytes(rows, splits, heads, dim) > MAX_PARTIAL_BYTES
    )
    programs = 1 if serial else min(splits, -(-BUSY_PROGRAMS // (tiles * blocks)))
    attended = query.new_empty(rows, heads, dim) if is_latent else query
    partials = stats = query  # unused by serial programs
    if not serial:
        partials = torch.empty(rows, splits, heads, dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(2, rows, splits, heads, dtype=torch.float32, device=query.device)
    resources = _resources(query, width, kind, groups, is_latent)
    if warps is not None:
        resources["num_warps"] = warps
    attend[(tiles, blocks, programs)](
        query, keys, values, tables, tile_begins, tile_sizes, positions, slots, prefix_lengths, offsets,
        attended, partials, stats, sinks, scaling, columns, tables.shape[1], splits, rows,
        **shape, SOFTCAP=kind.softcap, ROTARY=rotary, ROTARY_WIDTH=max(16, power_of_two(rotary)) if rotary else 0,
        PAGE=arena.page_size, SERIAL=serial, **options, **resources,
    )  # fmt: skip
    if not serial:
        combine_splits[(rows, heads)](
            partials, stats, sinks, positions, slots, attended, splits, **shape, **options, num_warps=1
        )  # fmt: skip
    return attended


def captured_length(
    rows: int,
    tiles: int,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None = None,
    is_latent: bool = False,
) -> int:
    """Maximum positions per sequence in a captured pass: `length`, or fewer to limit the memory of partial results.

    `dim`: features of a value. `window`: longest window of all layers.
    """
    blocks = head_blocks(heads) if is_latent else kv_heads
    splits, is_busy = num_splits(length), tiles * blocks >= BUSY_PROGRAMS
    if is_busy and _can_be_serial(dim, is_latent):
        return length
    while splits > 1 and _partial_bytes(rows, visible_splits(splits, window), heads, dim) > MAX_PARTIAL_BYTES:
        splits //= 2
    return min(length, splits * SPLIT)


def scratch_bytes(
    rows: int,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    tile_rows: int,
    window: int | None = None,
    is_latent: bool = False,
) -> int:
    """Bytes of the partial results of the largest pass of up to `rows` rows that combines splits.

    `dim`: features of a value. `tile_rows`: maximum rows of a tile. `window`: longest window of all layers.
    """
    splits = visible_splits(num_splits(length), window)
    if not _can_be_serial(dim, is_latent):
        return _partial_bytes(rows, splits, heads, dim)
    blocks = head_blocks(heads) if is_latent else kv_heads
    rows = 0 if splits == 1 else min(rows, tile_rows * BUSY_PROGRAMS // blocks)
    return min(MAX_PARTIAL_BYTES, _partial_bytes(rows, splits, heads, dim))


def _can_be_serial(dim: int, is_latent: bool) -> bool:
    """Whether registers allow one program to accumulate all splits."""
    return is_latent or power_of_two(dim) <= MAX_SERIAL_WIDTH


def _partial_bytes(rows: int, splits: int, heads: int, dim: int) -> int:
    return rows * splits * heads * (dim + 2) * torch.float32.itemsize


def _resources(query: torch.Tensor, width: int, kind: AttentionKind, groups: int, is_latent: bool) -> dict[str, int]:
    """Return the size of tiles, and the warps and pipeline stages of a program. `groups`: its query heads."""
    dtype = query.dtype
    if is_latent:
        warps, stages = (16, 1) if is_wide(dtype) else (8, 3)
        return {"HEIGHT": LATENT_HEIGHT, "BLOCK": BLOCK // 2, "num_warps": warps, "num_stages": stages}
    warps = _warps(dtype, query.shape[2], architecture(query.device), kind)
    return {"HEIGHT": tile_height(dtype, groups), "BLOCK": _block(dtype, width, kind), "num_warps": warps,
            "num_stages": _stages(dtype, width)}  # fmt: skip


def _warps(dtype: torch.dtype, dim: int, arch: int, kind: AttentionKind) -> int:
    """Warps of a program: as few as its registers allow, so that more programs share an SM.

    On sm_90, registers allow 4 warps for heads of 128, but not for smaller heads padded to 128, nor with a soft cap.
    Before sm_90, they allow 4 for heads of 64, but not with sinks.
    """
    if is_wide(dtype) or kind.softcap is not None or (arch < HOPPER and kind.sinks is not None):
        return 8
    return 4 if dim <= 64 or (arch == HOPPER and dim == MAX_SERIAL_WIDTH) else 8


def _block(dtype: torch.dtype, width: int, kind: AttentionKind) -> int:
    if is_wide(dtype):
        return min(BLOCK, max(16, 2048 // width))
    # With a soft cap, large blocks of large heads run out of registers.
    return BLOCK // 2 if width > MAX_SERIAL_WIDTH and kind.softcap is not None else BLOCK


def _stages(dtype: torch.dtype, width: int) -> int:
    return 1 if is_wide(dtype) else 3 if width <= MAX_SERIAL_WIDTH else 2
