"""Fake target workers that carry a draft."""

from typing import Any

from serving import RecordingTarget

from specpool.testing import FakeDraft


class CarryingTarget(RecordingTarget):
    """A target that records requests, and carries a draft."""

    def __init__(self, acceptance: float = 0.7, step_seconds: float | None = None, **knobs: Any) -> None:
        """`step_seconds`: duration of a draft step; None: no delay."""
        super().__init__(**knobs)
        self.draft = FakeDraft(self, acceptance, slots=self.slots)
        if step_seconds is not None:
            self.draft.pass_seconds = lambda rows: step_seconds
        self.carry(self.draft)
