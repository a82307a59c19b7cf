"""The content of files, read anew when they change: certificates and tokens are replaced while a process runs."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

Signature: TypeAlias = tuple[tuple[int, ...] | None, ...]


class Reloaded(Generic[T]):
    """What `load` makes of files. If changed files cannot be used, the last good content stays."""

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Loads once, and raises what `load` raises: a ValueError whose text may be logged."""
        self._paths, self._load = paths, load
        self._seen = self._signature()
        self._loaded = load()

    def current(self) -> T:
        """What the files hold now. Costs one `stat` for each file unless they have changed; never raises."""
        while (signature := self._signature()) != self._seen:
            self._seen = signature
            try:
                loaded = self._load()
            except ValueError as error:
                log.error("changed files cannot be used, what was read before stays: %s", error)
                continue
            if self._signature() == signature:  # else they changed while they were read, and may not fit together
                self._loaded = loaded
                log.info("read anew: %s", ", ".join(map(str, self._paths)))
        return self._loaded

    def _signature(self) -> Signature:
        return tuple(map(_signature, self._paths))


def _signature(path: Path) -> tuple[int, ...] | None:
    """A value that differs after every change of a file, also if a link now leads to another file; None if there is no
    file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev
