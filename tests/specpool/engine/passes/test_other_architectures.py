"""The compiled pass on other architectures: `vectors.c`, run by qemu."""

import shutil
import subprocess
from pathlib import Path

import pytest

from specpool.engine.native.compiler import FLAGS, FOLDER

VECTORS = Path(__file__).with_name("vectors.c")
FOREIGN = ["aarch64-linux-gnu-gcc", "-static"]
EMULATOR = "qemu-aarch64-static"


def logits(compiler: list[str], emulator: list[str], folder: Path, macros: list[str]) -> tuple[int, list[float]]:
    """The number of rows that differ between passes of one row and of many, and the last logits."""
    kinds = {"FLOAT32", macros[-1].removeprefix("-DKIND=")}
    macros = [*macros, "-DKINDS(X)=" + " ".join(f"X({kind})" for kind in sorted(kinds))]
    program, flags = str(folder / "vectors"), [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
    subprocess.run(
        [*compiler, *flags, f"-I{FOLDER}", *macros, str(VECTORS), "-o", program, "-lm"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    done = subprocess.run([*emulator, program], check=True, capture_output=True, text=True, timeout=300)
    different, *numbers = done.stdout.split()
    return int(different), [float(number) for number in numbers]


@pytest.mark.parametrize(
    "macros",
    [
        ["-DHEAD_DIM=16", "-DGROUPS=3", "-DKIND=Q8_0"],
        ["-DHEAD_DIM=64", "-DGROUPS=1", "-DKIND=BFLOAT16"],
        ["-DHEAD_DIM=80", "-DGROUPS=7", "-DKIND=Q4_1"],
    ],
    ids=" ".join,
)
def test_the_pass_is_batch_invariant_on_aarch64(tmp_path: Path, macros: list[str]) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    different, here = logits(["cc", "-march=native"], [], tmp_path, macros)
    assert different == 0
    if shutil.which(FOREIGN[0]) is None or shutil.which(EMULATOR) is None:
        pytest.skip("needs gcc-aarch64-linux-gnu and qemu-user-static of Debian")
    different, there = logits(FOREIGN, [EMULATOR], tmp_path, macros)
    assert different == 0
    assert there == pytest.approx(here, abs=1e-3 * max(map(abs, here)))
