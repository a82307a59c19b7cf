"""Copies a child process's log to our stderr, and keeps its last line as the reason for its end."""

import contextlib
import json
import os
import re
import signal
from threading import Thread

STDERR = 2
LAST_LINES_SECONDS = 1.0
"""Time to copy the last lines of a process that has ended. Its own children may keep the log open."""
# The beginning of an event in the log, or of a line that ends a program.
_PREFIX = re.compile(r"\S+ [A-Z]+ (\S+ )?\S+: |specpool-[a-z-]+: ")


class ChildLog:
    """Copies lines on a separate thread, so that a slow reader of stderr blocks nothing else."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        self._last = ""
        self._thread = Thread(target=self._copy, name="child log", daemon=True)

    def follow(self) -> None:
        """Begin to copy. Closes our end of `writing`, which the child has inherited."""
        os.close(self.writing)
        self._thread.start()

    def ending(self, status: int) -> str:
        """Return why the process has ended, in one line: its last line, unless a signal killed it."""
        self._thread.join(LAST_LINES_SECONDS)
        if status < 0:
            hint = "; is there enough memory?" if -status == signal.SIGKILL else ""
            return f"killed by {signal.Signals(-status).name}{hint}"
        return self._last if status and self._last else f"ended with status {status}"

    def _copy(self) -> None:
        with open(self._reading, "rb") as lines:
            for line in lines:
                self._last = _message(line) or self._last
                with contextlib.suppress(OSError):  # stderr is closed
                    os.write(STDERR, line)


def _message(line: bytes) -> str:
    """Return the message of a log line, in either format."""
    text = line.decode(errors="replace").strip()
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["message"])
    return _PREFIX.sub("", text, count=1)
