"""Batch invariance on other CPUs: a process that imitates each CPU runs the tests marked `cpus`."""

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
FILES = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.cpus" in path.read_text()]
# Flags of /proc/cpuinfo that each x86-64 level requires.
LEVELS = {"x86-64-v2": {"sse4_2"}, "x86-64-v3": {"avx2", "fma"}, "x86-64-v4": {"avx512f", "avx512bw", "avx512vl"}}
LEVELS["native"] = set()
# The code paths of torch, oneDNN and the compiled pass.
ATEN = {"default": set[str](), "avx2": LEVELS["x86-64-v3"], "avx512": LEVELS["x86-64-v4"]}
DNNL = {
    "SSE41": {"sse4_1"},
    "AVX2": LEVELS["x86-64-v3"],
    "AVX512_CORE": LEVELS["x86-64-v4"],
    "AVX512_CORE_BF16": {*LEVELS["x86-64-v4"], "avx512_bf16"},
}
LEVEL_OF = dict(zip(DNNL, LEVELS, strict=True))


@dataclass(frozen=True)
class Cpu:
    """The code paths of a CPU, and a number of threads."""

    aten: str
    dnnl: str
    threads: int

    def __str__(self) -> str:
        return f"{self.aten}-{self.dnnl}-{LEVEL_OF[self.dnnl]}-{self.threads}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a process that imitates this CPU."""
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "DNNL_MAX_CPU_ISA": self.dnnl,
            # The only code path of MKL that can be selected on every processor.
            **({"MKL_CBWR": "COMPATIBLE"} if self.aten == "default" else {}),
            "DECODER_CFLAGS": f"-march={LEVEL_OF[self.dnnl]}",
            "SPECPOOL_TEST_THREADS": str(self.threads),
        }

    def missing(self) -> set[str]:
        """CPU flags that this machine would need, but lacks."""
        here = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        assert here is not None
        return (ATEN[self.aten] | DNNL[self.dnnl] | LEVELS[LEVEL_OF[self.dnnl]]) - set(here[1].split())


OLD = Cpu("default", "SSE41", 3)
REAL = [("default", "SSE41"), ("avx2", "AVX2"), ("avx512", "AVX512_CORE"), ("avx512", "AVX512_CORE_BF16")]
ALL = [
    *(Cpu(aten, dnnl, threads=2) for aten, dnnl in product(ATEN, DNNL)),
    *(Cpu(*paths, threads) for paths in REAL for threads in (1, 3, 8)),
]

only_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86-64 processor")


def run_tests(cpu: Cpu, marked: str) -> None:
    if missing := cpu.missing():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marked, *FILES]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **cpu.variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


@only_x86
@pytest.mark.slow
def test_the_self_test_holds_on_an_old_cpu() -> None:
    run_tests(OLD, "cpus and not thorough and not all_cpus")


@only_x86
@pytest.mark.all_cpus
@pytest.mark.parametrize("cpu", ALL, ids=str)
def test_the_promise_holds_on_every_cpu(cpu: Cpu) -> None:
    run_tests(cpu, "cpus and not all_cpus")


@pytest.mark.cpus
def test_torch_imitates_the_cpu() -> None:
    expected = os.environ.get("ATEN_CPU_CAPABILITY", torch.backends.cpu.get_cpu_capability())
    assert torch.backends.cpu.get_cpu_capability().lower() == expected.lower()
