"""Times of a round add up, and a random head is right as often as intended."""

import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import shapes
from benchmarks.gpu import folders, part, worker_rounds
from benchmarks.gpu.events import Mark, Recorder, medians, times_of
from benchmarks.gpu.part import Findings, Settings

SHAPE = {**shapes.SHAPES["qwen3-0.6b"], "vocab_size": 800, "num_hidden_layers": 3, "intermediate_size": 256,
         "num_key_value_heads": 2, "head_dim": 64, "num_attention_heads": 4, "hidden_size": 512}  # fmt: skip


def mark(name: str, host_ms: float, device_ms: float | None = None) -> Mark:
    """A mark. `device_ms`: None without an event."""
    if device_ms is None:
        return Mark(name, host_ms / 1000, None)
    event = SimpleNamespace(ms=device_ms, elapsed_time=lambda other: other.ms - device_ms)
    return Mark(name, host_ms / 1000, event)


def test_times_of_the_parts_of_a_round() -> None:
    times = times_of([
        mark("begin", 0, 0), mark("target", 1, 1.5), mark("target", 2, 6), mark("draft", 2.5, 6.25),
        mark("draft", 3, 7), mark("steps", 3, 7), mark("steps", 3.5, 9), mark("wait", 4), mark("wait", 9.125),
        mark("reply", 9.5, 9.5),
    ])  # fmt: skip
    assert times == pytest.approx({
        "prepare_ms": 1.5, "target_ms": 4.5, "choose_ms": 0.25, "draft_ms": 0.75, "steps_ms": 2, "copy_ms": 0.125,
        "launched_ms": 3.5, "synced_ms": 9.125, "reply_ms": 9.5, "waits": 1,
    })  # fmt: skip
    assert times_of([mark("begin", 0), mark("reply", 5)]) == pytest.approx({"synced_ms": 5, "reply_ms": 5, "waits": 0})
    assert medians([{"a_ms": 1.23456, "waits": 1}, {"a_ms": 4, "b_ms": 2.0, "waits": 1}, {"a_ms": 0.5}]) == {
        "a_ms": 1.235, "waits": 1, "b_ms": 2.0,
    }  # fmt: skip


def test_parts_inside_others_do_not_count_and_calls_are_restored() -> None:
    class Model:
        def forward(self) -> int:
            return 1

        def draft(self) -> int:
            return 1 + self.forward()

    model, recorder, tolist = Model(), Recorder("cpu"), torch.Tensor.tolist
    with recorder.recording([(model, "forward", "target"), (Model, "draft", "draft")]):
        result, times = recorder.round(lambda: model.forward() + model.draft() + torch.zeros(1).tolist()[0])
    assert result == 3
    assert times.keys() >= {"target_ms", "choose_ms", "draft_ms"}
    assert times["waits"] == 0  # a CPU does not wait
    assert "forward" not in vars(model)
    assert torch.Tensor.tolist is tolist


def test_a_gpu_marks_events_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, other: "Event") -> float:
            return float(other.at - self.at)

    clock, model = count(), SimpleNamespace(forward=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run() -> None:
        model.forward()
        torch.cuda.synchronize()

    recorder = Recorder("cuda")
    with recorder.recording([(model, "forward", "target")]):
        rows = [recorder.round(run)[1] for _ in range(2)]
    assert [(row["prepare_ms"], row["target_ms"], row["waits"]) for row in rows] == [(1, 1, 1)] * 2


def test_a_head_is_right_in_70_percent_of_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "small", SHAPE)
    monkeypatch.setattr(folders, "OUTPUTS", 500)
    monkeypatch.setattr(part, "REHEARSED", replace(part.REHEARSED, batches=(8,), rounds=24))
    monkeypatch.setattr(worker_rounds, "DRAFTS", ["head"])
    settings = Settings(
        "cpu", "float32", "small", "small", True, str(tmp_path), str(tmp_path), time.monotonic() + 1e9
    )  # fmt: skip
    findings = Findings(tmp_path / "round.json")
    worker_rounds.measure_rounds(settings, findings)
    assert not {"failed", "left_out"} & findings.result.keys()
    drafted = [row["tokens_a_round"] for row in findings.result["rounds"] if row["way"] == "host"]
    assert drafted == [pytest.approx(sum(folders.ACCEPTANCE**n for n in range(5)), abs=0.4)]
