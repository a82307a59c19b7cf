"""Ctrl-C without stack traces."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def silent_interrupts() -> Iterator[None]:
    """Let Ctrl-C end this process without a stack trace, unless the process ignores or handles it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, before)


def run_command(main: Callable[[], None]) -> None:
    """Run a command. Ctrl-C ends the process with status 130."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
