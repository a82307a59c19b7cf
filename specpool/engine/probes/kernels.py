"""Tests the kernels of a GPU's pass, and chooses those of its products that are exact and fastest on the device."""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from specpool.engine.passes.gpu import attention
from specpool.engine.passes.gpu.attention import attend_extents, splits_for
from specpool.engine.passes.gpu.gemm import KINDS, Kind, Product
from specpool.engine.passes.gpu.graphs import Capture
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.probes.inputs import ProbeInputs

log = logging.getLogger(__name__)

# Rows of the products that are timed: plain decoding of one and of eight sequences, and verification of many drafts.
TIMED_ROWS = (1, 8, 40, 320)
REPEATS = 3
# Rows are also moved by this number, which is no multiple of any tile's height.
SHIFT = 3
# Positions of probed rows, in addition to those at the borders of splits.
POSITIONS = (0, 3, 70, 1100)


@torch.inference_mode()
def choose_products(
    model: GpuModel, most_rows: int, exact: bool, wanted: Kind | None = None, capture: Capture | None = None
) -> bool:
    """Sets the kind of every product of a pass. False if `exact` is asked for and some product has no exact kind.

    `most_rows`: tokens of the longest pass. `exact`: only kinds are chosen that give a row the same bits for every
    number of rows. `wanted`: the kind to choose where it is possible; without it, the fastest is chosen. But of exact
    kinds with different bits it is always the same one, since times differ from start to start. `capture`: captures
    products, so that their launches are not timed; None: launches are timed too. Nothing is exchanged with other ranks,
    so that kinds may differ among them; where sums are whole, only kinds with the bits of the first one are chosen,
    whose order of terms is that of the whole weight.
    """
    sizes = sorted({model.padded_rows(count) for count in range(1, most_rows + 1)})
    found, whole = True, model.group.ranks > 1 and not model.group.in_parts
    for (outputs, inputs), products in _by_shape(model).items():
        # Ranks exchange results of equal shapes, and only one kind has several parts.
        kinds = KINDS if not whole or products[0].parts == 1 else KINDS[:1]
        possible = dict.fromkeys(kinds)
        if exact:
            results = {kind: _if_exact(products[0], kind, sizes) for kind in kinds}
            own = results[KINDS[0]]
            possible = {kind: its for kind, its in results.items() if its and (its == own or not whole)}
            found &= bool(possible)
        alike = not exact or len(set(possible.values())) == 1
        if wanted in possible:
            chosen: Kind = wanted
        elif alike and len(possible) > 1:
            chosen = _fastest(products, list(possible), [model.padded_rows(rows) for rows in TIMED_ROWS], capture)
        else:
            chosen = next(iter(possible), KINDS[0])
        for product in products:
            product.kind = chosen
        log.info("products of %d outputs, %d inputs: %s, of %s", outputs, inputs, chosen, ", ".join(possible) or "none")
    return found


def _by_shape(model: GpuModel) -> dict[tuple[int, int], list[Product]]:
    shapes: dict[tuple[int, int], list[Product]] = {}
    for product in model.products():
        shapes.setdefault((product.out_features, product.in_features), []).append(product)
    return shapes


def _if_exact(product: Product, kind: Kind, sizes: Sequence[int]) -> bytes | None:
    """A digest of the results of a kind of product, if a row has the same bits in all these numbers of rows, and at
    another index; None if not, or if it cannot be computed.

    The sums cancel, so that their rounding errors show the order in which they were added.
    """
    weight, x = ProbeInputs(product.weight).product(product.out_features, product.in_features, sizes[-1])
    probe = Product(weight)
    probe.kind, probe.parts = kind, product.parts
    try:
        reference = probe(x)
        same = torch.equal(probe(x.roll(SHIFT, 0)), reference.roll(SHIFT, 1)) and all(
            torch.equal(probe(x[-size:].clone()), reference[:, -size:]) for size in sizes[:-1]
        )
    except Exception as error:  # the compiler for this GPU may raise anything
        log.warning("products of kind %s fail: %s", kind, error)
        return None
    if not same:
        return None
    # As the kernel after it adds up the parts, and goes on without rounding the sum.
    summed = reference[0].float()
    for part in reference[1:]:
        summed = summed + part
    return hashlib.sha256(summed.view(torch.uint8).cpu().numpy().tobytes()).digest()


def _fastest(products: Sequence[Product], kinds: Sequence[Kind], sizes: Sequence[int], capture: Capture | None) -> Kind:
    """The kind with the smallest geometric mean of the times of these numbers of rows."""
    times = {kind: _log_times(products, kind, sizes, capture) for kind in kinds}
    return min(times, key=times.__getitem__)


def _log_times(products: Sequence[Product], kind: Kind, sizes: Sequence[int], capture: Capture | None) -> float:
    """The logarithms of a product's seconds, added up over numbers of rows: none outweighs the others."""
    for product in products:
        product.kind = kind
    inputs = [torch.zeros(rows, products[0].in_features).to(products[0].weight) for rows in sizes]
    return sum(math.log(_seconds_each(products, x, capture)) for x in inputs)


def _seconds_each(products: Sequence[Product], x: torch.Tensor, capture: Capture | None) -> float:
    """Mean seconds of one of these products with the rows `x`."""

    def run() -> torch.Tensor:
        # One layer after the other, as in a pass: their weights do not all fit into a cache.
        results: list[torch.Tensor] = [product(x) for product in products]
        return results[-1]

    run()  # compiles
    again: Callable[[], object] = run
    if capture is not None:
        with suppress(RuntimeError):  # then launches are timed too
            again = capture(run)[0]
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
    busy = -(-attention.BUSY // kv_heads)  # so many tiles that a program handles all splits of one

    def attend(row: torch.Tensor, at: int, tiles: Sequence[range], splits: int) -> torch.Tensor:
        """The result of `row` at a position of the cache, among the rows of tiles, each given by its positions."""
        own = [position for positions in tiles for position in positions]
        sizes = [len(positions) for positions in tiles]
        begins = [sum(sizes[:index]) for index in range(len(sizes))]
        query = numbers.normal(len(own), query_groups * kv_heads, dim)
        probed = len(own) - 1 - own[::-1].index(at)
        query[probed] = row
        its_begins, its_sizes, its_positions = (torch.tensor(its, device=cache.device) for its in (begins, sizes, own))
        tiled = (its_begins, its_sizes, its_positions, its_positions)
        attended = attend_extents(query, keys, values, *tiled, dim**-0.5, splits)
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
