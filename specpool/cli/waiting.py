"""Shows what a command waits for: a live line on a terminal, otherwise a line per phase."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def shown(title: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a phase after the title, on standard error."""
    last = ""

    def print_line(phase: str) -> None:
        nonlocal last
        if phase != last:
            print(f"{title}: {clean(phase)}", file=sys.stderr, flush=True)
        last = phase

    if not sys.stderr.isatty():
        yield print_line
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(title)

    def show(phase: str) -> None:
        progress.update(task, description=f"{title}: {clean(phase)}")
        progress.start()

    try:
        yield show
    finally:
        progress.stop()


def clean(text: str) -> str:
    """Remove control characters, which could manipulate the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
