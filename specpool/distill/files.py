"""Files that are never incomplete."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_one_step(path: Path) -> Iterator[Path]:
    """A scratch path to write to, which takes the place of `path` at the end."""
    scratch = path.with_suffix(".part")
    yield scratch
    scratch.rename(path)
