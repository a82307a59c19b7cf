"""Progress of generation and training: a bar on a terminal, elsewhere some lines."""

from io import StringIO

import pytest
from rich.console import Console

from specpool.distill import progress


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_some_lines_elsewhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = StringIO()
    monkeypatch.setattr(progress, "console", Console(file=shown, force_terminal=is_terminal, width=100))
    with progress.counting("training", "steps", 200, done=100) as counter:
        for _ in range(100):
            counter.advance(", loss 1.5")
    if is_terminal:
        assert "━" in shown.getvalue()
        assert "200/200" in shown.getvalue()
    else:
        assert shown.getvalue().splitlines() == [
            f"training, loss 1.5: {step} of 200 steps" for step in (120, 140, 160, 180, 200)
        ]
