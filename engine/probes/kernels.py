"""Tests the kernels of a GPU's pass, and chooses those of its products that are exact and fastest on the device."""

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch

from engine.passes.gpu import attention
from engine.passes.gpu.attention import attend_extents, splits_for
from engine.passes.gpu.graphs import Record
from engine.passes.gpu.model import GpuModel
from engine.passes.gpu.products import KINDS, Kind, Product
from engine.probes.inputs import ProbeInputs

log = logging.getLogger(__name__)

# Rows of the products that are timed: plain decoding of one and of eight sequences, and verification of many drafts.
TIMED_ROWS = (1, 8, 40, 320)
REPEATS = 3
# Random numbers cost time: the outputs of a probed weight repeat after this number.
DISTINCT_OUTPUTS = 1024
# Positions of probed rows beside the borders of splits.
POSITIONS = (0, 3, 70, 1100)


@torch.inference_mode()
def choose_products(model: GpuModel, most_rows: int, exact: bool, record: Record | None) -> bool:
    """Sets the kind of every product of a pass to the fastest, if `exact` of those that are exact for every number of
    rows up to `most_rows`. False if for some product there is none.

    `record`: how to record products, so that their launches are not timed; None: they are.
    """
    sizes = sorted({model.padded_rows(count) for count in range(1, most_rows + 1)})
    found = True
    for (outputs, inputs), products in _by_shape(model).items():
        kinds = [kind for kind in KINDS if not exact or _is_exact(products[0], kind, sizes)]
        times = {kind: _log_times(products, kind, record) for kind in kinds}
        chosen = min(times, key=times.__getitem__, default=KINDS[0])
        for product in products:
            product.kind = chosen
        found &= bool(kinds)
        note = ", ".join(f"{kind} {math.exp(its / len(TIMED_ROWS)) * 1e6:.0f} us" for kind, its in times.items())
        log.info("products of %d outputs, %d inputs: %s%s", outputs, inputs, note or "none is exact", f": {chosen}")
    return found


def _by_shape(model: GpuModel) -> dict[tuple[int, int], list[Product]]:
    shapes: dict[tuple[int, int], list[Product]] = {}
    for product in model.products():
        shapes.setdefault((product.out_features, product.in_features), []).append(product)
    return shapes


def _is_exact(product: Product, kind: Kind, sizes: Sequence[int]) -> bool:
    """Whether a row of a product has the same bits in all these numbers of rows, and at another index.

    The sums cancel, so that their rounding errors show the order in which they were added.
    """
    numbers, inputs = ProbeInputs(product.weight), product.in_features
    order = numbers.order(inputs)
    half = numbers.normal(min(product.out_features, DISTINCT_OUTPUTS), inputs // 2)
    weight = torch.cat([half, half, torch.zeros(len(half), inputs % 2).to(half)], 1)[:, order]
    probe = Product(weight.repeat(-(-product.out_features // len(half)), 1)[: product.out_features])
    probe.kind, probe.parts = kind, product.parts
    x = numbers.cancelling(inputs, sizes[-1])[order].T.contiguous()
    reference = probe(x)
    return all(torch.equal(probe(x[-size:]), reference[:, -size:]) for size in sizes[:-1])


def _log_times(products: Sequence[Product], kind: Kind, record: Record | None) -> float:
    """Sum over numbers of rows of the logarithms of the seconds of a product, so that none outweighs the others."""
    for product in products:
        product.kind = kind
    inputs = [torch.zeros(rows, products[0].in_features).to(products[0].weight) for rows in TIMED_ROWS]
    return sum(math.log(_seconds_each(products, x, record)) for x in inputs)


def _seconds_each(products: Sequence[Product], x: torch.Tensor, record: Record | None) -> float:
    """Seconds of one of these products of the rows `x`."""

    def run() -> torch.Tensor:
        # One layer after the other, as in a pass: their weights do not all fit into a cache.
        results: list[torch.Tensor] = [product(x) for product in products]
        return results[-1]

    run()  # compiles
    again: Callable[[], object] = run if record is None else record(run)[0]
    return min(_seconds(again, x.device) for _ in range(REPEATS)) / len(products)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def attention_agrees(cache: torch.Tensor, query_groups: int, longest: int) -> bool:
    """Whether the kernels of attention give a row the same bits alone, beside others, in every tile and split.

    `cache`: keys or values of a layer, [kv_heads, columns, dim], which are not changed. `query_groups`: query heads per
    KV head. `longest`: positions that a sequence can have.
    """
    numbers, (kv_heads, _, dim) = ProbeInputs(cache), cache.shape
    near = [border + step for border in (attention.SPLIT, 2 * attention.SPLIT) for step in (-1, 0, 1)]
    positions = sorted({min(at, longest - 1) for at in (*POSITIONS, *near)})
    keys, values = numbers.normal(2, kv_heads, positions[-1] + 1, dim)
    tile, splits = attention.rows_per_tile(cache.dtype, query_groups), splits_for(positions[-1] + 1)
    busy = -(-attention.BUSY // kv_heads)  # rows with which a program handles all splits

    def attend(row: torch.Tensor, at: int, tiles: Sequence[range], splits: int) -> torch.Tensor:
        """The result of `row` at a position of the cache, among the rows of tiles, each given by its positions."""
        own = [position for positions in tiles for position in positions]
        rows = [count for positions in tiles for count in (len(positions), *[0] * (len(positions) - 1))]
        query = numbers.normal(len(own), query_groups * kv_heads, dim)
        probed = len(own) - 1 - own[::-1].index(at)
        query[probed] = row
        its_rows, its_positions = (torch.tensor(its, device=cache.device) for its in (rows, own))
        attended = attend_extents(query, keys, values, its_rows, its_positions, its_positions, dim**-0.5, splits)
        return attended[probed]

    def agrees(row: torch.Tensor, at: int) -> bool:
        alone = range(at, at + 1)
        last = range(max(0, at + 1 - tile), at + 1)
        first = range(at, min(at + tile, positions[-1] + 1))
        others = [range(position, position + 1) for position in positions]
        reference = attend(row, at, [alone], splits_for(at + 1))
        tilings = ([alone], [last], [first], [*others, last], [alone] * busy, [*[alone] * busy, first])
        return all(torch.equal(attend(row, at, tiles, splits), reference) for tiles in tilings)

    for position in positions:
        seen = position + 1
        # A row that weighs all that it sees equally, so that values cancel, and an ordinary one.
        values[:, :seen] = numbers.cancelling(seen, kv_heads, dim)[numbers.order(seen)].transpose(0, 1)
        ordinary = numbers.normal(query_groups * kv_heads, dim)
        if not agrees(torch.zeros_like(ordinary), position) or not agrees(ordinary, position):
            return False
    return True
