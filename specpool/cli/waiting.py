"""Shows why a command is waiting: a live line on a terminal, otherwise a line per phase."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column


@contextmanager
def waiting(command: str, address: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what the server at this address is doing, on standard error."""
    title, last = f"waiting for {address}", ""

    def print_line(phase: str) -> None:
        nonlocal last
        if phase != last:
            print(f"{command}: {title}: {clean(phase)}", file=sys.stderr, flush=True)
        last = phase

    if not sys.stderr.isatty():
        yield print_line
        return
    text = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
    console = Console(stderr=True)
    progress = Progress(SpinnerColumn(), TimeElapsedColumn(), text, console=console, transient=True, expand=True)
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
