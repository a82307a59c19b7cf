"""Private folders for compiled code, and its cache: no other user can write or replace loaded code."""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from platformdirs import user_cache_path

log = logging.getLogger(__name__)

DIGEST_BYTES = 32
TEMPORARY, MAX_REMOVED = "specpool-compiled-", 64
"""Prefix of private folders, and the maximum number of stale ones to remove at a time."""
ANY_ACCESS_BY_OTHERS = 0o077
WRITE_BY_OTHERS = 0o022
ROOT = 0


class NotPrivateError(OSError):
    """Another user could have written or replaced a file or folder."""


def candidate_folders() -> list[Path]:
    """Parent folders to try, best first. Some may not exist, or may not allow code to be loaded."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [user_cache_path("specpool"), *([Path(runtime)] if runtime else []), Path(tempfile.gettempdir())]


@contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """Create a folder that only this user can open, and remove it at the end, with those of killed processes.

    OSError: it cannot be created. NotPrivateError: another user could replace it.
    """
    parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # the check below refuses parents that others can write
    parent = parent.resolve()
    remove_stale_folders(parent)
    folder, lock = _create_locked(parent)
    try:
        _check_folder(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_stale_folders(parent: Path, maximum: int = MAX_REMOVED) -> None:
    """Remove the private folders of processes that were killed. Those in use are locked."""
    for folder in islice(parent.glob(f"{TEMPORARY}*"), maximum):
        with suppress(OSError):  # it is locked, belongs to another user, or is gone
            _check(folder, folder.lstat(), stat.S_IFDIR, ANY_ACCESS_BY_OTHERS)
            lock = _lock(folder)
            try:
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _create_locked(parent: Path) -> tuple[Path, int | None]:
    """Create a private folder and lock it. Without a lock if the file system has none: then none is removed either."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
        try:
            lock = _lock(folder)
        except (FileNotFoundError, BlockingIOError):  # another process took the new folder for a stale one
            continue
        except OSError:
            return folder, None
        if folder.is_dir():
            return folder, lock
        os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder until the returned descriptor is closed. BlockingIOError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_private(code: bytes, file: Path) -> Path:
    """Write a new file that only this user can open, and return it."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
    with open(descriptor, "wb") as opened:
        opened.write(code)
    return file


def write_cached(code: bytes, entry: Path, max_entries: int) -> None:
    """Cache code for later processes, and delete all but the `max_entries` most recently used files.

    Do nothing but log if that fails. Never load an entry directly: a file on a network file system could change or
    vanish under the process. Use `read_cached`, then load a private copy.
    """
    try:
        make_private(entry.parent)
        with private_folder(entry.parent) as folder:
            partial = write_private(_digest(code) + code, folder / entry.name)
            with partial.open("rb") as opened:
                os.fsync(opened)
            partial.rename(entry)
        others = [file for file in entry.parent.iterdir() if file.is_file() and file != entry]
        for old in sorted(others, key=lambda file: file.stat().st_mtime, reverse=True)[max_entries - 1 :]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.info("caching %s failed; the next start cannot reuse it: %s", entry.name, error)


def read_cached(entry: Path) -> bytes | None:
    """The cached code; None if there is none, it is damaged, or another user could have written it."""
    try:
        _check_folder(entry.parent)
        check_file(entry)
        content = entry.read_bytes()
        with suppress(OSError):  # a read-only file system
            os.utime(entry)
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if digest == _digest(code) else None


def make_private(folder: Path) -> None:
    """Create a folder that only this user can open, unless it exists. OSError if others could write or replace it."""
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # the check refuses parents that others can write
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_folder(folder)


def check_file(file: Path) -> None:
    """Raise NotPrivateError unless this user owns the file and no other user can write it."""
    _check(file, file.lstat(), stat.S_IFREG, WRITE_BY_OTHERS)


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def _check_folder(folder: Path) -> None:
    """Raise NotPrivateError unless only this user can open the folder, and no other user can replace it."""
    for parent in folder.parents:
        _check_parent(parent)
    _check(folder, folder.lstat(), stat.S_IFDIR, ANY_ACCESS_BY_OTHERS)


def _check(path: Path, status: os.stat_result, kind: int, forbidden: int) -> None:
    if stat.S_IFMT(status.st_mode) != kind:
        raise NotPrivateError(f"{path} has been replaced")
    if status.st_uid != os.geteuid():
        raise NotPrivateError(f"{path} belongs to user {status.st_uid}")
    if status.st_mode & forbidden:
        raise NotPrivateError(f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):o})")


def _check_parent(folder: Path) -> None:
    """Raise NotPrivateError if another user can rename entries of this folder."""
    status = folder.stat()
    if status.st_uid not in (ROOT, os.geteuid()):
        raise NotPrivateError(f"{folder} belongs to user {status.st_uid}")
    if status.st_mode & WRITE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
        raise NotPrivateError(f"{folder} is writable by other users (mode {stat.S_IMODE(status.st_mode):o})")
