"""Private folders for code that is compiled and loaded: nobody else may write or replace what is in them."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

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
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compiled-", dir=place.resolve()) as name:
        folder = Path(name)
        check_folder(folder)
        yield folder


def keep(file: Path, kept: Path, most: int) -> None:
    """Moves a file to its place in a folder of this user's alone, which keeps the `most` newest files.

    OSError if that is impossible; a file that was kept there before is then still whole.
    """
    kept.parent.mkdir(mode=0o700, exist_ok=True)
    check_folder(kept.parent)
    with file.open("rb") as written:
        os.fsync(written)
    file.rename(kept)
    newest = sorted(kept.parent.iterdir(), key=lambda its: its.stat().st_mtime, reverse=True)
    for old in newest[most:]:
        old.unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Raises NotPrivateError unless this is a folder of this user's that is open to nobody else, where nobody can put
    another one in its place."""
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
