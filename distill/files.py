"""Files that are never half there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_one_step(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` once it is complete."""
    scratch = path.with_suffix(".part")
    yield scratch
    scratch.rename(path)
