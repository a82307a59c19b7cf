"""Contents of files that are reloaded when they change, such as certificates and tokens."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.1
"""Minimum time between two checks of the files."""

T = TypeVar("T")

Signature: TypeAlias = tuple[tuple[int, ...] | None, ...]


class Reloaded(Generic[T]):
    """The loaded contents of files. Keeps the last valid contents while changed files are invalid."""

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Load the files once. `load` raises a ValueError, whose text may be logged, for invalid files."""
        self._paths, self._load = paths, load
        self._seen = self._signature()
        self._loaded = load()
        self._checked = time.monotonic()

    def current(self) -> T:
        """Return the contents, at most `CHECK_SECONDS` old. Never raises."""
        if time.monotonic() < self._checked + CHECK_SECONDS:
            return self._loaded
        self._checked = time.monotonic()
        while (signature := self._signature()) != self._seen:
            self._seen = signature
            try:
                loaded = self._load()
            except ValueError as error:
                log.error("cannot use changed files; keeping the previous contents: %s", error)
                continue
            if self._signature() == signature:  # otherwise they changed while being read
                self._loaded = loaded
                log.info("reloaded %s", ", ".join(map(str, self._paths)))
        return self._loaded

    def _signature(self) -> Signature:
        return tuple(map(_signature, self._paths))


def _signature(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes with the file, or with the target of a link. None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev
