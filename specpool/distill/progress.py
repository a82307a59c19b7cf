"""Progress of generation and training: a bar on a terminal, elsewhere some lines."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(soft_wrap=True)
LINES = 10
"""Lines for a whole task where there is no terminal."""


class Counter:
    """Counts to a total."""

    def __init__(self, progress: Progress, name: str, unit: str, total: int, done: int) -> None:
        self._progress, self._task = progress, progress.add_task(name, total=total, completed=done)
        self._name, self._unit, self._total, self._done = name, unit, total, done

    def advance(self, note: str = "") -> None:
        """Count one more. `note`: what to show beside the name."""
        self._done += 1
        self._progress.update(self._task, completed=self._done, description=f"{self._name}{note}")
        if self._progress.disable and self._done * LINES // self._total > (self._done - 1) * LINES // self._total:
            console.print(f"{self._name}{note}: {self._done:,} of {self._total:,} {self._unit}", highlight=False)


@contextmanager
def counting(name: str, unit: str, total: int, done: int = 0) -> Iterator[Counter]:
    """Show progress within this context. `unit`: what is counted, in the plural. `done`: by an earlier run."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Counter(progress, name, unit, total, done)
