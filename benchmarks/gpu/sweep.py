"""Times other tiles of the GEMMs and other warps of attention, and compares their bits with the chosen ones."""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from itertools import groupby, product

import torch

from benchmarks.gpu.gemms import gemm_shapes, timed_weights
from benchmarks.gpu.part import Findings, Settings
from benchmarks.gpu.timing import captured_microseconds
from benchmarks.shapes import SHAPES
from specpool.engine.numerics.triton_compat import triton
from specpool.engine.passes.gpu.attention import attend_extents, num_splits
from specpool.engine.passes.gpu.gemm import FEW_ROWS, MANY_ROWS, GemmTile, split_k_gemm, split_k_of
from specpool.engine.probes.inputs import ProbeInputs

# Minimum seconds left to start a tile or a number of warps.
CASE_SECONDS = 4
CHOSEN = "chosen"
# Tiles like those of `tile_of`, by maximum number of rows: outputs, rows, inputs, warps, stages.
TILES = {
    16: ((64, 16, 128, 4, 3), (64, 16, 128, 4, 4), (64, 16, 128, 4, 5), (64, 16, 64, 4, 8)),
    FEW_ROWS: ((64, 64, 128, 4, 2), (64, 64, 128, 4, 3), (64, 64, 64, 4, 5), (128, 64, 64, 4, 4)),
    MANY_ROWS: ((128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (256, 64, 64, 8, 4)),
}
# The GEMMs of a layer, by size.
GEMMS = ("gate_up", "down", "qkv", "out")
WARPS = (None, 4, 8)


@torch.inference_mode()
def measure_sweep(settings: Settings, findings: Findings) -> None:
    """Measure the largest GEMM, then attention, then the other GEMMs of the target."""
    torch.manual_seed(0)
    sweep_gemm(settings, findings, GEMMS[0])
    cases = product(settings.sizes.lengths, settings.sizes.batches, (1, 1 + settings.sizes.num_draft_tokens), WARPS)
    for cached, batch, tokens, warps in cases:
        what = f"{warps or CHOSEN} warps, {batch} x {tokens} rows, {cached} cached"
        add_row = partial(add_attention_row, settings, findings, cached, batch, tokens, warps)
        attempt_fitting(settings, findings, what, add_row)
    for name in GEMMS[1:]:
        sweep_gemm(settings, findings, name)


def sweep_gemm(settings: Settings, findings: Findings, name: str) -> None:
    """Add a row for each tile: its time at suitable row counts, and whether it has the bits of the chosen tile."""
    outputs, inputs = gemm_shapes(settings.target)[name]
    split_k = split_k_of(outputs, inputs)
    weight, x = ProbeInputs(settings.randn(1)).gemm(outputs, inputs, max(settings.sizes.timed_rows))
    weights = timed_weights(settings, weight)

    def add_row(counts: Sequence[int], title: str, tile: GemmTile | None) -> None:
        batches = {rows: x[:rows] for rows in counts}
        same_bits = all(
            torch.equal(split_k_gemm(batch, weight, split_k, tile), split_k_gemm(batch, weight, split_k))
            for batch in batches.values()
        )
        calls = {
            rows: [partial(split_k_gemm, batch, each, split_k, tile) for each in weights]
            for rows, batch in batches.items()
        }
        findings.add_row("gemm", {
            "gemm": name, "split_k": split_k, "tile": title, "same_bits": same_bits,
            **{f"us_of_{rows}": captured_microseconds(settings, calls[rows]) for rows in batches},
        })  # fmt: skip

    for maximum, group in groupby(settings.sizes.timed_rows, maximum_of):
        counts = list(group)
        for tile in (None, *(GemmTile(*numbers) for numbers in TILES[maximum])):
            title = CHOSEN if tile is None else " ".join(map(str, astuple(tile)))
            what = f"{name}, up to {maximum} rows, tile {title}"
            attempt_fitting(settings, findings, what, partial(add_row, counts, title, tile))


def maximum_of(rows: int) -> int:
    """The maximum number of rows whose tiles suit `rows`."""
    return next(maximum for maximum in TILES if rows <= maximum)


def add_attention_row(
    settings: Settings, findings: Findings, cached: int, batch: int, tokens: int, warps: int | None
) -> None:
    """Add the row of a number of warps; None: the chosen one."""
    shape, length = SHAPES[settings.target], cached + tokens
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    keys, values = settings.randn(2, kv_heads, batch * length, dim)
    query = settings.randn(batch * tokens, heads, dim)
    slots = torch.arange(batch, device=settings.device)
    positions = torch.arange(cached, length, device=settings.device).repeat(batch)
    columns = positions + slots.repeat_interleave(tokens) * length
    no_branch, sizes = torch.zeros_like(positions), torch.full_like(slots, tokens)

    def attend(query: torch.Tensor, warps: int | None) -> torch.Tensor:
        return attend_extents(
            query, keys, values, slots * tokens, sizes, positions, columns, no_branch, no_branch, dim**-0.5,
            num_splits(length), warps=warps,
        )  # fmt: skip

    same_bits = torch.equal(attend(query.clone(), warps), attend(query.clone(), None))
    findings.add_row("attention", {
        "rows": f"{batch} x {tokens}", "cached": cached, "warps": warps or CHOSEN, "same_bits": same_bits,
        "us": captured_microseconds(settings, [partial(attend, query, warps)]),
    })  # fmt: skip


def attempt_fitting(settings: Settings, findings: Findings, what: str, measure: Callable[[], object]) -> None:
    """Measure a configuration. It is no failure if it does not fit into an SM."""

    def run() -> None:
        try:
            measure()
        except triton.runtime.errors.OutOfResources as error:
            findings.add_row("too_large", {"too large": what, "why": str(error)})

    findings.attempt(settings, what, CASE_SECONDS, run)
