"""Describe a run of a benchmark: the command, the date, the machine, and the versions of what it measures."""

import os
import platform
import re
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("specpool", "torch", "transformers")


def describe_run(command: str | None = None) -> dict[str, Any]:
    """The `run` entry of a result. `command`: default: the command line of this process."""
    return {
        "command": command or " ".join(["python", shlex.join(sys.orig_argv[1:])]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **_versions()},
        "load_average": round(os.getloadavg()[0], 2),
    }


def machine() -> str:
    """Cores and processor, such as "2 cores of an AMD EPYC (AVX-512)"."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    name = re.sub(r"\((?:R|TM)\)| CPU| Processor| @.*", "", model[1]).strip() if model else platform.machine()
    vectors = next((label for flag, label in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in text), None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of an {name}" + (f" ({vectors})" if vectors else "")


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
