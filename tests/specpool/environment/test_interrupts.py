"""Ctrl-C while a process imports its modules ends it without a stack trace."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specpool.environment.process import silent_interrupts

# A module that every entry point imports; the process interrupts itself in the middle of it.
INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


@pytest.mark.parametrize("package", ["specpool", "coordinator", "target_worker"])
def test_an_interrupted_import_shows_no_stack_trace(package: str, tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text(INTERRUPTED)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", package, "up"], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_handlers_are_restored(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with silent_interrupts():
            inside = signal.getsignal(signal.SIGINT)
        assert inside is (signal.SIG_IGN if handler is signal.SIG_IGN else signal.SIG_DFL)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
