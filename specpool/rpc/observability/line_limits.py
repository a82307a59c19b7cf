"""Limits on log lines that callers can cause: one per second and kind, without the callers' text."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SECONDS = 1.0
"""Minimum time between two lines of the same kind."""
MAX_KINDS = 256
OTHER = "other"
# Loggers whose messages may quote a caller.
LIBRARIES = ("grpc", "asyncio")
# Lines that a place in our own code may log in a burst: at info level, and above.
INFO_BURST, WARNING_BURST = 32, 8


class TokenBucket:
    """Starts with `burst` tokens, its maximum, and gains `per_second`.

    Times are in seconds of any monotonic clock.
    """

    def __init__(self, burst: float, per_second: float, now: float) -> None:
        self._burst, self._per_second = burst, per_second
        self._tokens, self._at = burst, now

    def take(self, now: float) -> bool:
        """Take a token. Return False if there is none."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass
class _Allowance:
    lines: TokenBucket
    dropped: int = 0
    size: int = 0


class RecordLimit:
    """Limits the records of each place in the code, except at debug level."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowances: dict[tuple[object, ...], _Allowance] = {}
        self._clock = clock

    def shown(self, record: logging.LogRecord) -> logging.LogRecord | None:
        """Return the record to log: the original, a shortened one, or None."""
        if logging.root.isEnabledFor(logging.DEBUG):
            return record
        is_library = record.name.partition(".")[0] in LIBRARIES
        allowance = self._allowance(record, 1 if is_library else _burst(record))
        if is_library:
            arguments = record.args if isinstance(record.args, tuple) else ()
            allowance.size += sum(len(str(part)) for part in (record.msg, *arguments))
        if not allowance.lines.take(self._clock()):
            allowance.dropped += 1
            return None
        dropped, size, allowance.dropped, allowance.size = allowance.dropped, allowance.size, 0, 0
        if is_library:
            return _without_text(record, dropped + 1, size)
        return _with_count(record, dropped) if dropped else record

    def _allowance(self, record: logging.LogRecord, burst: int) -> _Allowance:
        error_type = record.exc_info[0] if record.exc_info else None
        kind: tuple[object, ...] = (record.name, record.levelno, record.pathname, record.lineno, error_type)
        if kind not in self._allowances and len(self._allowances) >= MAX_KINDS:
            kind = (OTHER, burst)
        return self._allowances.setdefault(kind, _Allowance(TokenBucket(burst, 1 / SECONDS, self._clock())))


class WithheldError(Exception):
    """Stands in for an error whose message must not be logged. Its own message is that error's type."""


def without_message(error: BaseException) -> Any:
    """Return the argument `exc_info` for an error whose message may quote a client."""
    return WithheldError, WithheldError(type(error).__qualname__), error.__traceback__


def _burst(record: logging.LogRecord) -> int:
    return WARNING_BURST if record.levelno > logging.INFO else INFO_BURST


def _without_text(record: logging.LogRecord, lines: int, size: int) -> logging.LogRecord:
    """Return the record of a library with its place, its length, and the type and traceback of its error."""
    shown = logging.makeLogRecord(record.__dict__)
    error = record.exc_info[1] if record.exc_info else None
    what = str(record.msg) if record.args else "message"  # without arguments, it may have been formatted already
    shown.msg = "%s (%s:%d): %d %s, %d bytes"
    shown.args = (what, record.filename, record.lineno, lines, "line" if lines == 1 else "lines", size)
    shown.exc_text = shown.stack_info = None
    shown.exc_info = without_message(error) if error is not None else None
    return shown


def _with_count(record: logging.LogRecord, dropped: int) -> logging.LogRecord:
    shown = logging.makeLogRecord(record.__dict__)
    shown.msg, shown.args = f"{record.getMessage()} (and {dropped} more like it)", ()
    return shown
