"""Captures lines that C++ and Rust libraries write to stderr, and logs them with the logger "stderr".

Such lines may quote callers, and callers may cause any number of them. Above debug level, the log therefore has only
their source locations, counts and lengths. If native code aborts the process, its last lines may be lost;
the stack of each thread is written as text instead.
"""

import atexit
import faulthandler
import io
import logging
import os
import re
import select
import sys
import threading
from typing import TextIO

from specpool.rpc.observability.line_limits import OTHER, SECONDS, LineCounts

log = logging.getLogger("stderr")

STDERR = 2
FLUSH_SECONDS = 1.0
READ_BYTES = 2**16
# Longer lines are split.
MAX_LINE_BYTES = 2**14
# Prefix of gRPC's own lines; the letter is the severity.
_GRPC = re.compile(r"([IWEF])\d{4} (?:\S+ +\d+ ([\w.-]+:\d+)\] )?")
_PANIC = re.compile(r"thread '[^']*' .*panicked at (?:\S*/)?([\w.-]+:\d+)")
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
# Last words of native code before it aborts, which operators need.
_FATAL = re.compile(r"terminate called|  what\(\): |memory allocation of \d|double free|malloc|free\(\)|corrupted ")
# A line of another rank's log, and the lines of its stack trace. Ranks never see callers' text.
_RANK = re.compile(r"\S+T\S+ ([A-Z]+) (?=rank )")
_TRACE = re.compile(r"Traceback |\s|[\w.]+(Error|Exception)\b")


def follow_native_lines(log_python: bool) -> TextIO:
    """Start logging everything that native code writes to stderr. Return the real stderr, for the log itself.

    `log_python`: also log what Python code writes to stderr, with its text; otherwise it goes to the real stderr.
    """
    real = os.fdopen(os.dup(STDERR), "w", buffering=1, errors="backslashreplace")
    faulthandler.enable(real)
    reading, writing = os.pipe()
    # A library that fills the pipe while it holds the GIL loses lines instead of deadlocking.
    os.set_blocking(writing, False)
    sys.stderr.flush()
    os.dup2(writing, STDERR)
    os.close(writing)
    sys.stderr = _LoggedLines() if log_python else real
    thread = threading.Thread(target=_log_lines, args=(reading,), name="stderr", daemon=True)
    thread.start()
    atexit.register(_restore, real, thread)
    return real


class _LoggedLines(io.TextIOBase):
    """A text stream whose lines are logged."""

    def __init__(self) -> None:
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                log.warning("%s", line.strip())
        return len(text)


class _NativeLog:
    """Logs lines at debug level, and counts them otherwise."""

    def __init__(self) -> None:
        self.counts = LineCounts()
        self._after_rank = False

    def add(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if not text:
            return
        found, panic, rank = _GRPC.match(text), _PANIC.match(text), _RANK.match(text)
        self._after_rank = rank is not None or (self._after_rank and _TRACE.match(text) is not None)
        level = _LEVELS[found[1]] if found else logging.WARNING
        if self._after_rank or _FATAL.match(text) or log.isEnabledFor(logging.DEBUG):
            level = logging.getLevelNamesMapping().get(rank[1], level) if rank else level
            log.log(level, "%s", text[rank.end() :] if rank else text)
        else:
            place = found[2] if found else f"panic at {panic[1]}" if panic else None
            self.counts.add(place or OTHER, len(line), level)

    def sum_up(self) -> None:
        for level, text in self.counts.due():
            log.log(level, "%s", text)


def _log_lines(reading: int) -> None:
    native, rest = _NativeLog(), b""
    while True:
        ready, _, _ = select.select([reading], [], [], SECONDS if native.counts.is_pending else None)
        data = os.read(reading, READ_BYTES) if ready else None
        if data is not None:
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE_BYTES or not data:
                lines, rest = [*lines, rest], b""
            for line in lines:
                native.add(line)
        native.sum_up()
        if data == b"":
            os.close(reading)
            return


def _restore(real: TextIO, thread: threading.Thread) -> None:
    """Restore stderr after the last lines are logged."""
    sys.stderr.flush()
    os.dup2(real.fileno(), STDERR)
    thread.join(FLUSH_SECONDS)
