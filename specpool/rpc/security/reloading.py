"""Contents of files that are reloaded when they change, such as certificates and tokens."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

Signature: TypeAlias = tuple[tuple[int, ...] | None, ...]


class Reloaded(Generic[T]):
    """The loaded contents of files. Keeps the last valid contents while changed files are invalid."""

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Load the files once. `load` raises a ValueError, whose text may be logged, for invalid files."""
        self._paths, self._load = paths, load
        self._seen = self._signature()
        self._loaded = load()

    def current(self) -> T:
        """Return the current contents. Never raises, and costs one `stat` per file unless files have changed."""
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
