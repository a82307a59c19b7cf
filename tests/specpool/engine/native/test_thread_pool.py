"""The thread pool of the compiled pass: `pool.c` runs random passes, with ThreadSanitizer if the compiler has it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from specpool.engine.native.compiler import FLAGS

DRIVER = Path(__file__).with_name("pool.c")
SANITIZED = ("-g", "-fsanitize=thread")
FEW_POLLS = "-DPOLLS=20"
"""Threads sleep in most stages."""


def wrong_passes(folder: Path, macros: tuple[str, ...], passes: int, callers: int, forks: int = 0) -> int:
    """Wrong passes, of `callers` threads that call at the same time, and of forked processes."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    program, flags = folder / "pool", [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
    built = subprocess.run(["cc", *flags, *macros, str(DRIVER), "-o", str(program)], capture_output=True, check=False)
    if built.returncode and macros[: len(SANITIZED)] == SANITIZED:
        pytest.skip("needs ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    command = [str(program), str(passes), str(callers), str(forks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return int(done.stdout)


@pytest.mark.parametrize("callers", [1, 3])
@pytest.mark.parametrize("macros", [(), (FEW_POLLS,)], ids=["polling", "sleeping"])
def test_threads_that_come_and_go_run_every_unit_once(tmp_path: Path, macros: tuple[str, ...], callers: int) -> None:
    assert wrong_passes(tmp_path, macros, 5000, callers) == 0


def test_forks_and_signals_in_the_middle_of_a_pass_change_nothing(tmp_path: Path) -> None:
    """A forked process has no other threads, so its passes run on one until the number of threads changes."""
    assert wrong_passes(tmp_path, (FEW_POLLS,), 5000, callers=2, forks=50) == 0


@pytest.mark.parametrize("callers", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "macros", [pytest.param((), marks=pytest.mark.slow), (FEW_POLLS,)], ids=["polling", "sleeping"]
)
def test_stages_see_what_earlier_stages_wrote(tmp_path: Path, macros: tuple[str, ...], callers: int) -> None:
    """ThreadSanitizer reports a data race where two threads are not ordered."""
    assert wrong_passes(tmp_path, (*SANITIZED, *macros), 1500, callers) == 0
