"""Converts panics of the tokenizers library, which is written in Rust, to ordinary exceptions."""

from collections.abc import Iterator
from contextlib import contextmanager


class PanicError(Exception):
    """A Rust library panicked. The process can continue."""


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic. Panics do not derive from `Exception`, so they would end the event loop."""
    return type(error).__name__ == "PanicException"  # the class cannot be imported


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise PanicError for a panic."""
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            raise PanicError(str(error)) from None
        raise
