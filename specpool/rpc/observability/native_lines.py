"""Captures lines that C++ and Rust libraries write to stderr, and logs them with the logger "stderr".

Only used when every line of the log must be JSON. If native code aborts the process, its last lines may be lost; the
stack of each thread is written as text instead.
"""

import atexit
import faulthandler
import logging
import os
import re
import sys
import threading
from typing import TextIO

log = logging.getLogger("stderr")

STDERR = 2
FLUSH_SECONDS = 1.0
# Prefix of gRPC's own lines; the letter is the severity.
_SEVERITY = re.compile(r"([IWEF])\d{4} ")
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}


def follow_native_lines() -> TextIO:
    """Start logging everything written to stderr. Return the real stderr, for the log itself."""
    real = os.fdopen(os.dup(STDERR), "w", buffering=1, errors="backslashreplace")
    faulthandler.enable(real)
    reading, writing = os.pipe()
    # A library that fills the pipe while it holds the GIL loses lines instead of deadlocking.
    os.set_blocking(writing, False)
    os.dup2(writing, STDERR)
    os.close(writing)
    thread = threading.Thread(target=_log_lines, args=(reading,), name="stderr", daemon=True)
    thread.start()
    atexit.register(_restore, real, thread)
    return real


def _log_lines(reading: int) -> None:
    with os.fdopen(reading, errors="replace") as lines:
        for line in lines:
            if text := line.strip():
                severity = _SEVERITY.match(text)
                log.log(_LEVELS[severity[1]] if severity else logging.WARNING, "%s", text)


def _restore(real: TextIO, thread: threading.Thread) -> None:
    """Restore stderr after the last lines are logged."""
    sys.stderr.flush()
    os.dup2(real.fileno(), STDERR)
    thread.join(FLUSH_SECONDS)
