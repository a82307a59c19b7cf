"""Compiles the forward pass."""

from collections.abc import Collection
from ctypes import CDLL
from pathlib import Path

from specpool.engine.native.compiler import POOL, VECTORS, compile_library

FOLDER = Path(__file__).parent
ROUNDED_FLAGS = ("-ffp-contract=off",)
"""No fused multiply-adds, so rounded activations give the same bits on every processor."""
SOURCES = (
    *(FOLDER / name for name in ("decoder.c", "rows.h", "gemm.h", "tiles.h", "rounded.h", "dots.h", "panels.h")),
    POOL,
    VECTORS,
)


def compile_decoder(
    head_dim: int, groups: int, kinds: Collection[str], rounded: bool = False, measured: bool = False
) -> CDLL | None:
    """Compile the library for this head size and `groups` query heads per KV head; None if this machine cannot.

    `kinds`: of the weights, named as in panels.h. `rounded`: quantized kinds take activations rounded to 8 bits.
    `measured`: measure the time of the stages.
    """
    macros = (
        f"-DHEAD_DIM={head_dim}",
        f"-DGROUPS={groups}",
        "-DKINDS(X)=" + " ".join(f"X({kind})" for kind in sorted(kinds)),
        *(["-DROUND_ACTIVATIONS=1"] if rounded else []),
        *(["-DMEASURED"] if measured else []),
    )
    return compile_library("the forward pass", SOURCES, macros, ROUNDED_FLAGS if rounded else ())
