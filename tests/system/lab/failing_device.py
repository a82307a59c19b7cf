"""A worker whose device can fail: `python -m lab.failing_device ROLE FLAGS`.

A pass that finds a file with the worker's role as its name in the folder FAILURES removes it, and fails with the error
that it names. So does every later pass of the process, as after an error of CUDA.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

FAILURES = "FAILURES"
"""Environment variable."""
BROKEN, NO_MEMORY = "broken", "no memory"


def fail_on_demand(role: str) -> None:
    """Make passes look for the file."""
    import torch

    from specpool.engine.run.runner import PassRunner

    errors = {
        BROKEN: torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        NO_MEMORY: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    }
    file, run, failed = Path(os.environ[FAILURES]) / role, PassRunner.run, list[str]()

    def run_or_fail(*arguments: Any) -> Any:
        if file.exists():
            failed.append(file.read_text())
            file.unlink()
        if failed:
            raise errors[failed[0]]
        return run(*arguments)

    PassRunner.run = run_or_fail  # type: ignore[method-assign]


if __name__ == "__main__":
    role = sys.argv.pop(1)
    fail_on_demand(role)
    import_module(f"{role}_worker.server").main()
