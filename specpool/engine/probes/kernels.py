"""Tests the GPU kernels on the device, and chooses the fastest batch-invariant backend for each GEMM."""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.passes.gpu import attention
from specpool.engine.passes.gpu.attention import attend_pages, num_splits
from specpool.engine.passes.gpu.experts import GpuExperts
from specpool.engine.passes.gpu.gemm import GEMM_BACKENDS, Gemm, GemmBackend, cublas_rows_of
from specpool.engine.passes.gpu.graphs import Capture
from specpool.engine.passes.gpu.head_gemm import HeadGemm
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.passes.kinds import FULL_ATTENTION, AttentionKind
from specpool.engine.probes.inputs import ProbeInputs

log = logging.getLogger(__name__)

# Row counts to time: from plain decoding of a few sequences to verification of many drafts.
TIMED_ROWS = (8, 40, 64, 128, 320)
# cuBLAS must save this share of the time.
MIN_SAVING = 0.03
REPEATS = 3
# Rows are also shifted by this number, which is not a multiple of any tile height.
SHIFT = 3
# Positions to probe, besides those around the borders of splits.
POSITIONS = (0, 3, 70, 1100)


@torch.inference_mode()
def choose_gemms(
    model: GpuModel, max_rows: int, exact: bool, preferred: GemmBackend | None = None, capture: Capture | None = None
) -> bool:
    """Set the backends of every GEMM. Return False if `exact` and a GEMM or mixture of experts is not batch-invariant.

    Where both backends give a row the same bits, cuBLAS takes over at the number of rows where it becomes faster.

    `max_rows`: tokens of the largest pass. `exact`: allow batch-invariant backends only. `preferred`: use this backend
    where allowed. The default is the fastest one; if the backends give different bits, it is the first, because times
    vary between starts. `capture`: capture GEMMs, so their times exclude launches.

    Ranks choose without communication, and may choose differently. With whole sums, a rank allows only backends
    with the bits of the first one, which adds terms in the order of the unsharded weight.
    """
    sizes = sorted({model.padded_rows(count) for count in range(1, max_rows + 1)})
    timed_sizes = [size for size in map(model.padded_rows, TIMED_ROWS) if size <= sizes[-1]]
    all_found, whole_sums = True, model.group.ranks > 1 and not model.group.in_parts
    for (outputs, inputs, _), gemms in _by_shape(model).items():
        allowed: dict[GemmBackend, bytes | None] = dict.fromkeys(GEMM_BACKENDS)
        if exact:
            digests = {backend: _digest_if_exact(gemms[0], backend, sizes) for backend in GEMM_BACKENDS}
            first = digests[GEMM_BACKENDS[0]]
            allowed = {
                name: digest for name, digest in digests.items() if digest and (digest == first or not whole_sums)
            }
            all_found &= bool(allowed)
        same_bits = not exact or len(set(allowed.values())) == 1
        if preferred in allowed:
            cublas_rows = cublas_rows_of(preferred)
        elif same_bits and len(allowed) > 1:
            cublas_rows = _fastest(gemms, timed_sizes, capture)
        else:
            cublas_rows = cublas_rows_of(next(iter(allowed), GEMM_BACKENDS[0]))
        for gemm in gemms:
            gemm.cublas_rows = cublas_rows
        log.info(
            "GEMM with %d outputs, %d inputs: %s, of %s",
            outputs, inputs, gemms[0].backends, ", ".join(allowed) or "none",
        )  # fmt: skip
    all_agree = all(experts_agree(experts, sizes) for experts in _by_size(model)) and all(
        head_gemm_agrees(gemm, sizes) for gemm in {each.weight.shape: each for each in model.head_gemms()}.values()
    )
    return all_found and (all_agree or not exact)


def experts_agree(experts: GpuExperts, sizes: Sequence[int]) -> bool:
    """Return whether a row has the same bits in passes of these sizes, which also compiles the kernels of each."""
    x = ProbeInputs(experts.gate_up.weight).normal(sizes[-1], experts.gate_up.in_features)
    slots = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return _rows_agree(lambda rows: experts(rows, slots[: len(rows)]).partials[0], x, sizes)


def head_gemm_agrees(gemm: HeadGemm, sizes: Sequence[int]) -> bool:
    """Return whether a row has the same bits in passes of these sizes, which also compiles the kernels of each."""
    weight, x = ProbeInputs(gemm.weight).gemm(gemm.out_features, gemm.in_features, sizes[-1])
    probe = HeadGemm(weight.repeat(gemm.heads, 1, 1))
    return _rows_agree(probe, x[:, None].repeat(1, gemm.heads, 1), sizes)


def _rows_agree(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Return whether the last rows of `x` have the same bits in passes of these sizes."""
    try:
        reference = run(x)
        return all(torch.equal(run(x[-size:].clone()), reference[-size:]) for size in sizes[:-1])
    except Exception as error:  # the compiler for this GPU may raise anything
        log.warning("kernels failed: %s", error)
        return False


def _by_size(model: GpuModel) -> list[GpuExperts]:
    """Return one mixture of experts of each size."""
    return list({(each.gate_up.weight.shape, each.shared is None): each for each in model.experts()}.values())


def _by_shape(model: GpuModel) -> dict[tuple[int, int, int], list[Gemm]]:
    """GEMMs by outputs, inputs and split-K. The head never uses split-K, but may be as large as another weight."""
    shapes: dict[tuple[int, int, int], list[Gemm]] = {}
    for gemm in model.gemms():
        shapes.setdefault((gemm.out_features, gemm.in_features, gemm.split_k), []).append(gemm)
    return shapes


def _digest_if_exact(gemm: Gemm, backend: GemmBackend, sizes: Sequence[int]) -> bytes | None:
    """A digest of the results of a backend; None if it fails, or a row's bits depend on the row count or its index.

    The sums cancel, so rounding errors reveal the order of summation.
    """
    weight, x = ProbeInputs(gemm.weight).gemm(gemm.out_features, gemm.in_features, sizes[-1])
    probe = Gemm(weight)
    probe.cublas_rows, probe.split_k = cublas_rows_of(backend), gemm.split_k
    try:
        reference = probe(x)
        agrees = torch.equal(probe(x.roll(SHIFT, 0)), reference.roll(SHIFT, 1)) and all(
            torch.equal(probe(x[-size:].clone()), reference[:, -size:]) for size in sizes[:-1]
        )
    except Exception as error:  # the compiler for this GPU may raise anything
        log.warning("GEMM backend %s failed: %s", backend, error)
        return None
    if not agrees:
        return None
    # Like the next kernel: add the partial sums in float32, without rounding.
    summed = reference[0].float()
    for partial in reference[1:]:
        summed = summed + partial
    return hashlib.sha256(summed.view(torch.uint8).cpu().numpy().tobytes()).digest()


def _fastest(gemms: Sequence[Gemm], sizes: Sequence[int], capture: Capture | None) -> int | None:
    """The number of rows from which cuBLAS is the faster backend; None: it never is."""
    fastest = None
    for rows in sorted(sizes, reverse=True):
        seconds = {backend: _seconds_of(gemms, backend, rows, capture) for backend in GEMM_BACKENDS}
        if seconds["cublas"] > (1 - MIN_SAVING) * seconds["triton"]:
            break
        fastest = rows
    return fastest


def _seconds_of(gemms: Sequence[Gemm], backend: GemmBackend, rows: int, capture: Capture | None) -> float:
    """Mean seconds of one of these GEMMs with a backend."""
    for gemm in gemms:
        gemm.cublas_rows = cublas_rows_of(backend)
    x = torch.zeros(rows, gemms[0].in_features).to(gemms[0].weight)

    def run() -> torch.Tensor:
        # One layer after the other, as in a pass, so their weights do not all fit into the cache.
        results: list[torch.Tensor] = [gemm(x) for gemm in gemms]
        return results[-1]

    run()  # compiles
    timed: Callable[[], object] = run
    if capture is not None:
        with suppress(RuntimeError):  # then the times include launches
            timed = capture(run)[0]
    return min(_seconds(timed, x.device) for _ in range(REPEATS)) / len(gemms)


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
def attention_agrees(arena: KVArena, query_groups: int, max_length: int, kind: AttentionKind = FULL_ATTENTION) -> bool:
    """Return whether a row gets the same bits alone, beside others, in every tile and split, and on any pages.

    `arena`: the cache to imitate, left unchanged. `query_groups`: query heads per KV head. `max_length`: maximum
    positions of a sequence.
    """
    cache, value_dim = arena.keys[0], arena.values[0].shape[2]
    numbers, (kv_heads, _, dim), is_latent = ProbeInputs(cache), cache.shape, arena.latent_rank is not None
    borders = [border + step for border in (attention.SPLIT, 2 * attention.SPLIT) for step in (-1, 0, 1)]
    beyond = (kind.window or 0) + 2 * attention.SPLIT  # the first split is before the window
    positions = sorted({min(position, max_length - 1) for position in (*POSITIONS, *borders, beyond)})
    probed, columns = _two_copies(arena, numbers, positions[-1] + 1)
    probed.keys[0][:, columns] = numbers.normal(kv_heads, 1, positions[-1] + 1, dim)
    tile, splits = attention.rows_per_tile(cache.dtype, query_groups, is_latent), num_splits(positions[-1] + 1)
    blocks = attention.head_blocks(query_groups) if is_latent else kv_heads
    busy = -(-attention.BUSY_PROGRAMS // blocks)  # tiles from which one program handles all splits

    def attend(row: torch.Tensor, position: int, tiles: Sequence[range], splits: int, slot: int = 0) -> torch.Tensor:
        """Attend from `row` at a position of the sequence in `slot`, among tiles. A tile lists its rows' positions."""
        row_positions = [each for tile in tiles for each in tile]
        sizes = [len(tile) for tile in tiles]
        begins = [sum(sizes[:index]) for index in range(len(sizes))]
        query = numbers.normal(len(row_positions), query_groups * kv_heads, dim)
        index = len(row_positions) - 1 - row_positions[::-1].index(position)
        query[index] = row
        tiled = [torch.tensor(numbers, device=cache.device) for numbers in (begins, sizes, row_positions)]
        tile_begins, tile_sizes, own = tiled
        slots, none = torch.full_like(own, slot), torch.zeros_like(own)
        attended = attend_pages(
            query, probed, 0, tile_begins, tile_sizes, own, slots, none, none, dim**-0.5, splits, kind
        )
        return attended[index]

    def agrees(row: torch.Tensor, position: int) -> bool:
        alone = range(position, position + 1)
        last = range(max(0, position + 1 - tile), position + 1)
        first = range(position, min(position + tile, positions[-1] + 1))
        others = [range(other, other + 1) for other in positions]
        reference = attend(row, position, [alone], num_splits(position + 1))
        tilings = ([alone], [last], [first], [*others, last], [alone] * busy, [*[alone] * busy, first])
        return all(torch.equal(attend(row, position, tiles, splits, slot=1), reference) for tiles in tilings)

    for position in positions:
        seen = position + 1
        cancelling = numbers.cancelling(seen, kv_heads, value_dim)[numbers.order(seen)].transpose(0, 1)
        probed.values[0][:, columns[:, :seen]] = cancelling[:, None]
        ordinary = numbers.normal(query_groups * kv_heads, dim)
        uniform = torch.zeros_like(ordinary)  # weighs all positions equally, so values cancel
        if not agrees(uniform, position) or not agrees(ordinary, position):
            return False
    return True


def _two_copies(arena: KVArena, numbers: ProbeInputs, length: int) -> tuple[KVArena, torch.Tensor]:
    """Create a one-layer arena with one sequence on ordered and one on shuffled pages. Also return their columns."""
    (kv_heads, _, dim), size = arena.keys[0].shape, arena.page_size
    pages = -(-length // size)
    copies = KVArena(
        1, kv_heads, 2 * pages * size, dim, arena.keys[0].dtype, arena.device, tables=(2, pages), page_size=size,
        latent_rank=arena.latent_rank,
    )  # fmt: skip
    copies.assign(0, 0, range(pages))
    copies.assign(1, 0, [pages + page for page in numbers.order(pages).tolist()])
    copies.flush()
    columns = torch.tensor([copies.columns_of(slot, 0, length) for slot in range(2)], device=arena.device)
    return copies, columns
