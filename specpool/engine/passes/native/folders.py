"""Private folders for code that is compiled and loaded: nobody else may write or replace what is in them."""

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from platformdirs import user_cache_path

log = logging.getLogger(__name__)

DIGEST_BYTES = 32
OTHERS = 0o077
OTHERS_MAY_WRITE = 0o022
ROOT = 0


class NotPrivateError(OSError):
    """A file or folder that somebody else could have written or replaced."""


def places() -> list[Path]:
    """Folders in which private ones may be made, the best first. Some may not exist, or not allow code to be loaded."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [user_cache_path("specpool"), *([Path(runtime)] if runtime else []), Path(tempfile.gettempdir())]


@contextmanager
def private_folder(place: Path) -> Iterator[Path]:
    """A new folder in `place`, open to this user only, and removed at the end. OSError if it cannot be made there;
    NotPrivateError if somebody else could replace it."""
    place.mkdir(mode=0o755, parents=True, exist_ok=True)  # a place that others may write is refused
    with tempfile.TemporaryDirectory(prefix="compiled-", dir=place.resolve()) as name:
        folder = Path(name)
        _check_folder(folder)
        yield folder


def write(code: bytes, file: Path) -> Path:
    """Writes a new file that only this user can open, and returns it."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
    with open(descriptor, "wb") as written:
        written.write(code)
    return file


def keep(code: bytes, kept: Path, most: int) -> None:
    """Keeps code for later processes, in a folder that only this user can open, where the `most` files stay that were
    used last. Where that is impossible nothing is kept.

    Code that is loaded from such a file could change or vanish under a process, on a network's file system or when the
    file is damaged: it is to be read, and loaded from another.
    """
    try:
        make_private(kept.parent)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            unfinished = write(_digest(code) + code, Path(folder) / kept.name)
            with unfinished.open("rb") as written:
                os.fsync(written)
            unfinished.rename(kept)
        others = [file for file in kept.parent.glob(f"*{kept.suffix}") if file != kept]
        for old in sorted(others, key=lambda file: file.stat().st_mtime, reverse=True)[most - 1 :]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.info("compiled code is not kept for later starts: %s", error)


def make_private(folder: Path) -> None:
    """Makes a folder that only this user can open, unless it exists. OSError if others could write or replace it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_folder(folder)


def read_kept(kept: Path) -> bytes | None:
    """The code that was kept in this file; None if there is none, it is damaged, or others could have written it."""
    try:
        _check_folder(kept.parent)
        check_file(kept)
        content = kept.read_bytes()
        with suppress(OSError):  # a read-only file system
            os.utime(kept)
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if digest == _digest(code) else None


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def _check_folder(folder: Path) -> None:
    """Raises NotPrivateError unless the folder is this user's, closed to others, and cannot be replaced by them."""
    for parent in folder.parents:
        _check_parent(parent)
    _check(folder, folder.lstat(), stat.S_IFDIR, OTHERS)


def check_file(file: Path) -> None:
    """Raises NotPrivateError unless this is a file of this user's that nobody else may write."""
    _check(file, file.lstat(), stat.S_IFREG, OTHERS_MAY_WRITE)


def _check(path: Path, found: os.stat_result, kind: int, forbidden: int) -> None:
    if stat.S_IFMT(found.st_mode) != kind:
        raise NotPrivateError(f"{path} is something else by now")
    if found.st_uid != os.geteuid():
        raise NotPrivateError(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & forbidden:
        raise NotPrivateError(f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):o})")


def _check_parent(folder: Path) -> None:
    """Raises NotPrivateError if others may rename what is in this folder."""
    found = folder.stat()
    if found.st_uid not in (ROOT, os.geteuid()):
        raise NotPrivateError(f"{folder} belongs to user {found.st_uid}")
    if found.st_mode & OTHERS_MAY_WRITE and not found.st_mode & stat.S_ISVTX:
        raise NotPrivateError(f"{folder} can be written by others (mode {stat.S_IMODE(found.st_mode):o})")
