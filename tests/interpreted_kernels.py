"""Engines on a CPU that run attention with the GPU's kernels."""

import pytest

from engine import startup
from engine.passes import lean
from engine.probes import self_test


def attend_by_kernels(patch: pytest.MonkeyPatch) -> None:
    """Makes engines on any device run attention with the kernels, and few passes, since the interpreter is slow."""
    patch.setattr(lean, "attends_by_kernels", lambda *_: True)
    patch.setattr(self_test, "LONG_PASSES", (20,))
    patch.setattr(self_test, "PROBED_PASSES", (1,))
    patch.setattr(startup, "measure_step_times", lambda _: {})
    patch.setattr(startup, "measure_seconds_per_cached", lambda _: 0.0)
