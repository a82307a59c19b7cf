"""The GPU kernels compile without a GPU: no spills, shared memory within the limit, few launches."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specpool.engine.passes.gpu.gemm import GemmTile, tile_of

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
LATENT = ["deepseek-v2-lite", "glm-4.7-flash", "deepseek-v3"]
MIXTURES = ["qwen3-30b-a3b", "gpt-oss-20b", "glm-4.5-air", "qwen3-next-80b-a3b", "lfm2-8b-a1b", *LATENT]
HYBRIDS, SHORT_CONVS = ["qwen3.5-0.8b", "qwen3.5-9b", "qwen3-next-80b-a3b"], ["lfm2-1.2b", "lfm2-8b-a1b"]
# Kernels of a layer, including one to combine splits. A mixture of experts adds four, its shared MLP three, and latent
# attention four.
MAX_KERNELS, MAX_KERNELS_WITH_EXPERTS, OF_LATENT_ATTENTION = 10, 17, 4
# A tile of attention may spill four registers. On sm_100, one with two heads of 256 spills more.
MAX_SPILLED_BYTES, SPILLING, MAX_SPILLED_BYTES_ON_SM_100 = 16, {"gemma2-9b", "gemma3-4b"}, 272
KERNELS = {
    "activate", "add_and_norm", "attend", "combine_splits", "finish_step", "reduce_parts", "rotate_and_cache",
    "split_k_gemm",
}  # fmt: skip
OF_MODELS, OF_HEADS = {"accept", "change_rows", "find_min_logits", "rank_next", "score"}, {"join_states"}
OF_DELTA_NETS, OF_EXPERTS = {"convolve", "gate", "scan"}, {"choose_experts", "combine", "group_choices", "grouped_gemm"}
# Kernels of a step of an EAGLE head.
MAX_STEP_KERNELS = 15


def compile_kernels(archs: list[str], dtypes: list[str], shapes: list[str], *options: str) -> list[dict[str, Any]]:
    """The results of the benchmark, in a process that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernels", "--archs", *archs, "--dtypes", *dtypes, "--shapes", *shapes]
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["passes"]
    assert len(rows) == len(archs) * len(dtypes) * len(shapes) * (2 if "--ranks" in options else 1)
    return rows


def assert_good(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        has_experts = row["shape"] in MIXTURES
        is_latent = row["shape"] in LATENT
        maximum = (MAX_KERNELS_WITH_EXPERTS if has_experts else MAX_KERNELS) + OF_LATENT_ATTENTION * is_latent
        assert row["kernels_a_layer"] <= maximum
        assert not row["fused"], row
        kernels = (
            KERNELS | (OF_HEADS if "kernels_a_step" in row else OF_MODELS) | (OF_EXPERTS if has_experts else set())
        )
        kernels |= OF_DELTA_NETS if row["shape"] in HYBRIDS else set()
        kernels |= {"convolve_gated"} if row["shape"] in SHORT_CONVS else set()
        if is_latent:
            kernels = (kernels - {"rotate_and_cache"}) | {"cache_latents", "head_gemm", "split_queries"}
        assert {kernel["kernel"] for kernel in row["kernels"]} - {"cap_logits"} == kernels
        assert row.get("kernels_a_step", 0) <= MAX_STEP_KERNELS
        spills = row["sm"] == 100 and row["shape"] in SPILLING
        for kernel in row["kernels"]:
            assert kernel["spilled_bytes"] <= (MAX_SPILLED_BYTES_ON_SM_100 if spills else MAX_SPILLED_BYTES), row
            assert kernel["shared_bytes"] <= row["shared_limit"], row


@pytest.mark.slow
def test_the_kernels_of_a_short_pass_compile() -> None:
    assert_good(compile_kernels(["90"], ["bfloat16"], ["qwen3-8b"], "--quick"))


def test_the_passes_use_every_tile_of_a_gemm() -> None:
    from benchmarks.kernels import PASSES

    def tiles(counts: Iterable[int], outputs: int, wide: bool) -> set[GemmTile]:
        return {tile_of(rows, outputs, 1, wide, arch=90) for rows in counts}

    for outputs, wide in product((1024, 10_240, 24_576), (False, True)):
        assert tiles(map(sum, PASSES), outputs, wide) == tiles(range(8, 2049, 8), outputs, wide)


@pytest.mark.slow
def test_the_kernels_of_eagle_heads_compile() -> None:
    assert_good(compile_kernels(["90"], ["bfloat16"], ["qwen3-8b eagle1", "qwen3-8b eagle3"], "--quick"))


@pytest.mark.slow
def test_the_kernels_of_windows_and_soft_caps_compile() -> None:
    rows = compile_kernels(["90"], ["bfloat16"], ["gemma2-9b"], "--quick")
    assert_good(rows)
    variants = [kernel["variants"] for kernel in rows[0]["kernels"] if kernel["kernel"] == "attend"]
    assert variants == [2]  # with a window, and without


@pytest.mark.slow
def test_the_kernels_of_mixtures_of_experts_compile() -> None:
    assert_good(compile_kernels(["90"], ["bfloat16"], MIXTURES, "--quick"))


@pytest.mark.slow
def test_the_kernels_of_hybrids_compile() -> None:
    assert_good(compile_kernels(["90"], ["bfloat16"], [*HYBRIDS[1:], *SHORT_CONVS], "--quick"))


@pytest.mark.slow
def test_the_kernels_of_latent_attention_compile() -> None:
    assert_good(compile_kernels(["90"], ["bfloat16"], LATENT[1:], "--quick"))


@pytest.mark.slow
def test_the_kernels_of_all_passes_compile() -> None:
    assert_good(compile_kernels(["90"], ["bfloat16"], ["qwen3-8b"]))


@pytest.mark.all_kernels
@pytest.mark.parametrize("ranks", [4, 8])
def test_the_kernels_of_a_large_sharded_model_compile(ranks: int) -> None:
    assert_good(compile_kernels(["90"], ["bfloat16"], ["llama3-70b"], "--ranks", str(ranks)))


@pytest.mark.all_kernels
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_all_kernels_compile_for_every_gpu(arch: str, dtype: str) -> None:
    from benchmarks.kernels import ALL_SHAPES

    assert_good(compile_kernels([arch], [dtype], list(ALL_SHAPES)))
