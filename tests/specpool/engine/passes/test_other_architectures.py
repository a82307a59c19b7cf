"""The compiled pass on other architectures: `vectors.c`, run by qemu."""

import math
import shutil
import subprocess
from pathlib import Path

import pytest
from processors import each_imitated

from specpool.engine.native.compiler import FLAGS, FOLDER
from specpool.engine.passes.native.decoder import ROUNDED_FLAGS

VECTORS = Path(__file__).with_name("vectors.c")
FOREIGN = ["aarch64-linux-gnu-gcc", "-static"]
EMULATOR = "qemu-aarch64-static"


def logits(compiler: list[str], emulator: list[str], folder: Path, macros: list[str]) -> tuple[int, list[float]]:
    """The number of rows that differ between passes of one row and of many, and the last logits."""
    kinds = {"FLOAT32", macros[-1].removeprefix("-DKIND=")}
    macros = [*macros, "-DRANK=0", "-DKINDS(X)=" + " ".join(f"X({kind})" for kind in sorted(kinds))]
    program, flags = str(folder / "vectors"), [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
    subprocess.run(
        [*compiler, *flags, f"-I{FOLDER}", *macros, str(VECTORS), "-o", program, "-lm"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    done = subprocess.run([*emulator, program], check=True, capture_output=True, text=True, timeout=300)
    different, *numbers = done.stdout.split()
    return int(different), [float(number) for number in numbers]


def foreign(macros: list[str], folder: Path, *flags: str) -> tuple[int, list[float]]:
    if shutil.which(FOREIGN[0]) is None or shutil.which(EMULATOR) is None:
        pytest.skip("needs gcc-aarch64-linux-gnu and qemu-user-static of Debian")
    return logits([*FOREIGN, *flags], [EMULATOR, "-cpu", "max"], folder, macros)


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
    different, there = foreign(macros, tmp_path)
    assert different == 0
    assert there == pytest.approx(here, abs=1e-3 * max(map(abs, here)))


ROUNDED = pytest.mark.parametrize(
    "macros",
    [
        [*ROUNDED_FLAGS, "-DROUND_ACTIVATIONS=1", *shape, f"-DKIND={kind}"]
        for shape, kind in [
            (("-DHEAD_DIM=16", "-DGROUPS=3"), "Q8_0"),  # parts of the attended rows span heads
            (("-DHEAD_DIM=64", "-DGROUPS=3"), "Q4_1"),
        ]
    ],
    ids=lambda macros: " ".join(macros[2:]),
)


@pytest.mark.slow
@ROUNDED
@each_imitated
def test_a_pass_with_rounded_activations_has_the_same_bits_on_every_x86_processor(
    tmp_path: Path, macros: list[str], processor: str
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    different, here = logits(["cc", "-march=native"], [], tmp_path, macros)
    assert different == 0
    assert all(map(math.isfinite, here))
    assert logits(["cc", f"-march={processor}"], [], tmp_path, macros) == (0, here)


@ROUNDED
@pytest.mark.parametrize("flags", [[], ["-march=armv8.2-a+dotprod"]], ids=["armv8", "dotprod"])
def test_a_pass_with_rounded_activations_has_the_same_bits_on_aarch64(
    tmp_path: Path, macros: list[str], flags: list[str]
) -> None:
    there = foreign(macros, tmp_path, *flags)
    assert there == logits(["cc", "-march=native"], [], tmp_path, macros)
