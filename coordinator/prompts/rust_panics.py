"""Panics of the tokenizers library, which is written in Rust, as errors of the call in which they happened."""

from collections.abc import Iterator
from contextlib import contextmanager


class PanicError(Exception):
    """A library panicked: no input should make it do so, but the process can go on."""


def is_panic(error: BaseException) -> bool:
    """Whether this is a panic. It is no `Exception`, so it would end the thread or the event loop."""
    return type(error).__name__ == "PanicException"  # the class cannot be imported


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """Turns a panic into a PanicError."""
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            raise PanicError(str(error)) from None
        raise
