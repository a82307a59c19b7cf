"""The GPU's kernels compile for GPUs that are not here: no spills, shared memory within the limit, few launches."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
# Kernels that a layer launches, where splits are joined by one of their own.
MOST_KERNELS = 10
# Bytes: a tile of attention may be four registers short.
MOST_SPILLED = 16
KERNELS = {
    "activate", "add_and_norm", "attend", "find_min_logits", "join_splits", "multiply", "rotate_and_cache", "score",
}  # fmt: skip


def compiled(archs: list[str], dtypes: list[str], shapes: list[str], ranks: int = 1) -> list[dict[str, Any]]:
    """What the benchmark says, in a process that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernels", "--archs", *archs, "--dtypes", *dtypes, "--shapes", *shapes]
    command += ["--ranks", str(ranks)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["passes"]
    assert len(rows) == len(archs) * len(dtypes) * len(shapes) * (1 if ranks == 1 else 2)
    return rows


def assert_good(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["kernels_a_layer"] <= MOST_KERNELS
        assert not row["fused"], row
        assert {kernel["kernel"] for kernel in row["kernels"]} == KERNELS
        for kernel in row["kernels"]:
            assert kernel["spilled_bytes"] <= MOST_SPILLED, row
            assert kernel["shared_bytes"] <= row["shared_limit"], row


def test_the_kernels_of_a_pass_compile() -> None:
    assert_good(compiled(["90"], ["bfloat16"], ["qwen3-8b"]))


@pytest.mark.all_kernels
@pytest.mark.parametrize("ranks", [4, 8])
def test_the_kernels_of_a_large_divided_model_compile(ranks: int) -> None:
    assert_good(compiled(["90"], ["bfloat16"], ["llama3-70b"], ranks))


@pytest.mark.all_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_all_kernels_compile_for_every_gpu(arch: str, dtype: str) -> None:
    from benchmarks.kernels import ALL_SHAPES

    assert_good(compiled([arch], [dtype], list(ALL_SHAPES)))
