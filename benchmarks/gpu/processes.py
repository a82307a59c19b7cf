"""Runs a part in its own process, with a time limit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import BROKEN, Settings

ROOT = Path(__file__).parents[2]
# A part starts nothing new after this share of its time, and gets these seconds at the end to stop its processes.
WORKING, ENDING = 0.9, 15
SHARED_MEMORY, PAIR_BYTES = Path("/dev/shm"), 24 * 2**30


def run_part(name: str, settings: Settings, seconds: float, minimum: float) -> dict[str, Any]:
    """Run a part for at most this long. Return its result, which its file has too.

    A process that crashes or breaks the CUDA context is followed by another, which continues behind the failed
    measurement, if `minimum` seconds are left. An existing file holds the findings of an earlier run, to continue.
    """
    began, file = time.monotonic(), Path(settings.output) / f"{name}.json"
    while True:
        left = began + seconds - time.monotonic()
        attempted = len(_read(file).get("attempted", ()))
        own = settings.until(time.monotonic() + WORKING * left)
        command = [sys.executable, "-m", "benchmarks.gpu.part", name, own.as_argument()]
        status = run_process(command, _environment(settings), left)
        result = _read(file)
        crashed = status is not None and status not in (0, 1)
        tried = result.get("attempted", [])
        if crashed and status != BROKEN and len(tried) > attempted:
            failure = {"failed": tried[-1], "error": f"exited with status {status}"}
            result["failed"] = [*result.get("failed", ()), failure]
        if not crashed or len(tried) == attempted or began + seconds - time.monotonic() < minimum:
            break
        file.write_text(json.dumps(result))
    if status != 0:
        reason = f"not done after {seconds:.0f} s" if status is None else f"exited with status {status}"
        result.setdefault("error", reason)
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def run_process(command: list[str], environment: Mapping[str, str], seconds: float) -> int | None:
    """Run a process for at most this long, with its output on standard error. Return its status; None: it took longer.

    `environment`: variables to add to ours.
    """
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=2, process_group=0)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_process(process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, and kill its process group if that takes too long."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for the weights of the pair: in memory if they fit."""
    fits = SHARED_MEMORY.exists() and shutil.disk_usage(SHARED_MEMORY).free >= PAIR_BYTES
    return tempfile.TemporaryDirectory(prefix="specpool-gpu-", dir=SHARED_MEMORY if fits else None)


def _environment(settings: Settings) -> dict[str, str]:
    interpreted = {"TRITON_INTERPRET": "1"} if settings.device == "cpu" else {}
    # Parts share compiled kernels. By default Triton keeps them in the home folder, for later runs too.
    cache = {} if os.access(Path.home(), os.W_OK) else {"TRITON_CACHE_DIR": f"{settings.scratch}/triton"}
    return interpreted | cache


def _read(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return result
