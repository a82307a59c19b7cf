"""Shows the progress of a plan: a bar for each phase on a terminal, elsewhere a line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str], None]
"""Report a finished step of a phase, and describe the next one."""


class Phases:
    """Numbers and shows the phases of a plan."""

    def __init__(self, console: Console, count: int) -> None:
        """`count`: number of phases."""
        self._console, self._count, self._begun = console, count, 0
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, TextColumn("{task.fields[step]}"), console=console, disable=not console.is_terminal
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the phases within this context."""
        with self._progress:
            yield

    @contextmanager
    def phase(self, description: str, steps: int | None = None) -> Iterator[Report]:
        """Show a phase within this context. `steps`: number of reports to expect; None if unknown."""
        self._begun += 1
        description = f"{self._begun}/{self._count} {description}"
        if not self._console.is_terminal:
            self._console.print(description, highlight=False, markup=False, soft_wrap=True)
        task = self._progress.add_task(description, total=steps, step="")
        yield lambda step: self._progress.update(task, advance=1, step=step)
        done = steps or 1
        self._progress.update(task, total=done, completed=done, step="")
        self._progress.stop_task(task)
