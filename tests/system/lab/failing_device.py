"""A worker whose device can fail: `python -m lab.failing_device ROLE FLAGS`.

If the folder FAILURES has a file named after the worker's role, the next pass removes it and raises the error that the
file names. Every later pass of the process raises it too, as after a CUDA error.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

FAILURES = "FAILURES"
"""Environment variable with the folder."""
BROKEN, NO_MEMORY = "broken", "no memory"


def fail_on_demand(role: str) -> None:
    """Patch forward passes to look for the file."""
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
