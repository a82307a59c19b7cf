"""Logs what libraries in C++ and Rust write to stderr, past Python's logging, as events of the logger "stderr".

Used only where every line of the log must be JSON. When native code ends the process, its last words may be lost:
instead, the stack of each thread is written, as text.
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
END_SECONDS = 1.0
# How gRPC's own lines begin; the letter is their severity.
_SEVERITY = re.compile(r"([IWEF])\d{4} ")
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}


def follow_native_lines() -> TextIO:
    """Logs each line that is written to stderr from now on; returns the real stderr, for the log itself."""
    real = os.fdopen(os.dup(STDERR), "w", buffering=1, errors="backslashreplace")
    faulthandler.enable(real)
    reading, writing = os.pipe()
    # A library that fills the pipe while it keeps Python from reading loses lines, instead of waiting for ever.
    os.set_blocking(writing, False)
    os.dup2(writing, STDERR)
    os.close(writing)
    thread = threading.Thread(target=_log_lines, args=(reading,), name="stderr", daemon=True)
    thread.start()
    atexit.register(_end, real, thread)
    return real


def _log_lines(reading: int) -> None:
    with os.fdopen(reading, errors="replace") as lines:
        for line in lines:
            if text := line.strip():
                severity = _SEVERITY.match(text)
                log.log(_LEVELS[severity[1]] if severity else logging.WARNING, "%s", text)


def _end(real: TextIO, thread: threading.Thread) -> None:
    """Restores stderr, once the last lines written to it are logged."""
    sys.stderr.flush()
    os.dup2(real.fileno(), STDERR)
    thread.join(END_SECONDS)
