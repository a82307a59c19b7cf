"""Other processors that this one can imitate."""

from pathlib import Path

import pytest

CPUINFO = Path("/proc/cpuinfo")
FEATURES = {"x86-64": "sse2", "x86-64-v3": "avx2", "skylake-avx512": "avx512bw"}
"""Values of -march, and the CPU feature that each needs. None has byte dot products."""


def imitated() -> list[str]:
    """The values of -march whose code runs here."""
    here = CPUINFO.read_text().split() if CPUINFO.exists() else []
    return [processor for processor, feature in FEATURES.items() if feature in here]


each_imitated = pytest.mark.parametrize(
    "processor", [pytest.param(each, marks=[pytest.mark.slow] * (each != "x86-64-v3")) for each in imitated()]
)
