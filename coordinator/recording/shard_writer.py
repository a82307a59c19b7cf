"""Appends recorded answers to shards in a folder, and deletes shards to stay within bounds. Blocks on the disk.

Several coordinators may share a folder. Every method may raise OSError; the next call starts a new shard.
"""

import contextlib
import io
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from specpool.protocol.recordings import FINISHED, PREFIX, UNFINISHED, Header, RecordedAnswer, shards_in

SHARDS = 16
"""Number of full shards that fill the folder. Each shard gets 1/SHARDS of the size and age bounds."""
MAX_SHARD_SECONDS = 3600.0


@dataclass(frozen=True)
class Bounds:
    max_bytes: int
    """Maximum size of all shards together."""
    max_age_seconds: float
    """Maximum age of an answer."""

    @property
    def shard_bytes(self) -> int:
        return self.max_bytes // SHARDS

    @property
    def shard_seconds(self) -> float:
        """Maximum duration of a shard, and interval between searches for expired shards."""
        return min(MAX_SHARD_SECONDS, self.max_age_seconds / SHARDS)

    def is_expired(self, last_written: float) -> bool:
        """Whether a shard's first answer may exceed the age before the next search.

        A shard from the future has an unknown age: the clock was set back.
        """
        age = time.time() - last_written
        return not -self.shard_seconds <= age <= self.max_age_seconds - 2 * self.shard_seconds


@dataclass
class _Shard:
    path: Path
    file: io.FileIO
    header: Header
    began: float
    num_bytes: int = 0


class ShardWriter:
    def __init__(self, folder: Path, bounds: Bounds) -> None:
        self.folder, self._bounds = folder, bounds
        self._shard: _Shard | None = None
        self._searched: float | None = None
        """Time of the last search for expired shards."""

    def append(self, header: Header, answer: RecordedAnswer) -> None:
        """Append an answer from the target that `header` describes."""
        line = answer.encode()
        with self._closing_on_error():
            shard = self._shard
            if shard is not None and _is_deleted(shard):  # perhaps with the folder
                shard.file.close()
                self._shard = None
            elif shard is not None and (shard.header != header or self._is_full(shard, len(line))):
                self.finish()
            shard = self._shard = self._shard or self._new_shard(header, len(line))
            _write(shard.file, line)
            shard.num_bytes += len(line)

    def tick(self) -> None:
        """Finish the current shard if it is old, and delete expired ones. Call often."""
        with self._closing_on_error():
            if self._shard is not None and self._is_old(self._shard.began):
                self.finish()
            if self._searched is None or self._is_old(self._searched):
                self._make_room(0)

    def finish(self) -> None:
        """Give the current shard its final name."""
        if (shard := self._shard) is not None:
            with self._closing_on_error():
                os.fsync(shard.file.fileno())
                self._shard = None
                _close(shard)

    def _is_full(self, shard: _Shard, num_bytes: int) -> bool:
        return shard.num_bytes + num_bytes > self._bounds.shard_bytes or self._is_old(shard.began)

    def _is_old(self, since: float) -> bool:
        return time.monotonic() - since >= self._bounds.shard_seconds

    def _new_shard(self, header: Header, num_bytes: int) -> _Shard:
        line = header.encode()
        self._make_room(max(self._bounds.shard_bytes, len(line) + num_bytes))
        path = self.folder / f"{PREFIX}{secrets.token_hex(8)}{UNFINISHED}"
        file = io.FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600), "a")
        shard = self._shard = _Shard(path, file, header, time.monotonic())
        _write(file, line)
        shard.num_bytes = len(line)
        return shard

    def _make_room(self, num_bytes: int) -> None:
        """Create the folder. Delete expired shards, then the oldest until `num_bytes` fit, unfinished ones last."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = self._shard.path if self._shard is not None else None
        found = [(path, status) for path, status in _statuses(shards_in(self.folder)) if path != own]
        found.sort(key=lambda shard: (shard[0].name.endswith(UNFINISHED), shard[1].st_mtime))
        excess = sum(status.st_size for _, status in found) + num_bytes - self._bounds.max_bytes
        for path, status in found:
            if excess > 0 or self._bounds.is_expired(status.st_mtime):
                path.unlink(missing_ok=True)
                excess -= status.st_size
        self._searched = time.monotonic()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Close the current shard on failure. Its complete lines stay readable."""
        try:
            yield
        except OSError:
            if (shard := self._shard) is not None:
                self._shard = None
                with contextlib.suppress(OSError):
                    _close(shard)
            raise


def _statuses(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each path with its status. Skip files that another coordinator has renamed or deleted."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if S_ISREG((status := path.lstat()).st_mode):
                yield path, status


def _write(file: io.FileIO, line: bytes) -> None:
    """Write a whole line. On a full disk, the first write is short and the next one raises."""
    while line:
        line = line[file.write(line) or 0 :]


def _is_deleted(shard: _Shard) -> bool:
    return os.fstat(shard.file.fileno()).st_nlink == 0


def _close(shard: _Shard) -> None:
    """Close a shard, then rename it, or remove it if it has no answers. Its file may have been deleted."""
    shard.file.close()
    with contextlib.suppress(FileNotFoundError):
        if shard.num_bytes > len(shard.header.encode()):
            shard.path.rename(shard.path.with_name(shard.path.name.removesuffix(UNFINISHED) + FINISHED))
        else:
            shard.path.unlink()
