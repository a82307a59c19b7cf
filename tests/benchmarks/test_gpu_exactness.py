"""The exactness part succeeds with exact passes, and finds planted bugs."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_kernels import FakeGraphs, attend_pages, imitate_graphs

from benchmarks import shapes
from benchmarks.gpu import engines, exactness, part, steps
from benchmarks.gpu.part import Findings, Settings
from specpool.engine.passes.gpu import draft_loop, layers
from specpool.engine.passes.gpu.graphs import Run
from specpool.engine.passes.gpu.states import StateMemory
from specpool.engine.run import pass_selection as forward
from specpool.engine.run.engine import Engine

pytest.importorskip("triton")

Bug = Callable[[pytest.MonkeyPatch], object]


class GraphsTurningStale(FakeGraphs):
    """Replays leave an earlier result, once the engine has started: the self-test would find them."""

    is_stale = False

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        replay, result = super().__call__(run)
        return lambda: None if self.is_stale else replay(), result


def _round_otherwise_in_batches(patch: pytest.MonkeyPatch) -> None:
    """Make attention round long sequences in another way if the pass has many rows."""

    def attend(query: torch.Tensor, *others: Any) -> torch.Tensor:
        attended, positions = attend_pages(query, *others), others[4]
        is_long, has_many_rows = positions.max() > 60, len(query) > 8
        return attended * (1 + 1e-6 * bool(is_long and has_many_rows))

    patch.setattr(layers, "attend_pages", attend)


def _replay_stale_results(patch: pytest.MonkeyPatch) -> None:
    def start(*arguments: Any, **options: Any) -> Engine:
        patch.setattr(GraphsTurningStale, "is_stale", False)
        engine = engines.start(*arguments, **options)
        patch.setattr(GraphsTurningStale, "is_stale", True)
        return engine

    patch.setattr(forward, "CudaGraphs", GraphsTurningStale)
    patch.setattr(exactness, "start", start)


def _record_the_same_layers(patch: pytest.MonkeyPatch) -> None:
    """Make graphs record the layers that the self-test chose last."""
    choose = StateMemory.choose

    def start(*arguments: Any, **options: Any) -> Engine:
        patch.setattr(StateMemory, "choose", choose)
        engine = engines.start(*arguments, **options)
        patch.setattr(StateMemory, "choose", lambda *_: None)
        return engine

    patch.setattr(exactness, "start", start)


def _draft_at_one_position(patch: pytest.MonkeyPatch) -> None:
    """Make the draft loop start all drafts at position 0."""
    patch.setattr(draft_loop, "POSITIONS", draft_loop.PREFIX_LENGTHS)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, shape in part.TINY_SHAPES.items():
        monkeypatch.setitem(shapes.SHAPES, name, shape)
    imitate_graphs(monkeypatch)
    monkeypatch.setattr(forward, "compile_pass", lambda *_: None)
    deadline = time.monotonic() + 1e9
    return Settings("cpu", "float32", *part.TINY_SHAPES, True, str(tmp_path), str(tmp_path), deadline)


@pytest.mark.slow
def test_exact_passes_have_equal_bits(settings: Settings) -> None:
    findings = Findings(Path(settings.output) / "exactness.json")
    exactness.measure_exactness(settings, findings)
    assert not {"failed", "left_out"} & findings.result.keys()
    rows = findings.result["exactness"]
    assert all(row["equal"] and row["rows"] for row in rows)
    assert {(row["what"], row["how"]) for row in rows} >= {
        (what, how)
        for what in ("step", "verification", "ragged", "states after layers 1, 2", "states after layers 2")
        for how in ("launched", "replayed")
    }
    assert {row["positions"] for row in rows} == set(exactness.REHEARSED_POSITIONS)
    assert {row["what"] for row in rows if row["model"] == settings.draft} > {"draft loop", "single steps"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (_round_otherwise_in_batches, {"verification"}),
        (_replay_stale_results, {"step", "ragged"}),
        (_record_the_same_layers, {"states after layers 2"}),
        (_draft_at_one_position, {"draft loop"}),
    ],
)
def test_planted_bugs_are_found(settings: Settings, monkeypatch: pytest.MonkeyPatch, bug: Bug, found: set[str]) -> None:
    bug(monkeypatch)
    findings = Findings(Path(settings.output) / "exactness.json")
    with pytest.raises(exactness.DifferentBitsError, match="comparisons found different bits"):
        exactness.measure_exactness(settings, findings)
    assert {row["what"] for row in findings.result["exactness"] if not row["equal"]} >= found


def test_drafts_are_compared_with_single_steps(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for same in (True, False):
        findings = Findings(Path(settings.output) / f"{same}.json")
        steps.measure_drafts(settings, findings)
        assert all(row["same_tokens"] is same for row in findings.result["drafts"])
        monkeypatch.setattr(steps, "draft_by_loop", lambda _, spans, __: [[0, 0, 0, 0]] * len(spans))
