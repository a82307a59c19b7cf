"""The benchmark of a GPU: it runs to its end on a CPU, whatever its parts do, and its figures are what they say."""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_kernels import imitate_kernels

from benchmarks import shapes
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import device as device_part
from benchmarks.gpu import draft as draft_part
from benchmarks.gpu import part
from benchmarks.gpu.kernels import counts_that_differ, row_counts
from benchmarks.gpu.part import Findings, Settings
from benchmarks.gpu.profile import times_of
from benchmarks.gpu.report import goals
from specpool.engine.passes.gpu.graphs import Run
from specpool.engine.run import pass_selection as forward

pytest.importorskip("triton")

KINDS = ("chosen", "triton", "cublas")
# Lists of rows that each part finds.
ROWS = {
    "kernels": ("kernels", "products"), "target": ("steps",), "draft": ("drafts",), "pair": ("runs",),
    "transformers": ("runs",), "profile": ("steps", "names"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, shape in part.TINY_SHAPES.items():
        monkeypatch.setitem(shapes.SHAPES, name, shape)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts run here, which saves their imports."""

    def run(command: list[str], environment: Mapping[str, str], seconds: float) -> str | None:
        assert environment == {"TRITON_INTERPRET": "1"}
        return None if part.run(command[3], Settings(**json.loads(command[4]))) else "status 1"

    monkeypatch.setattr(gpu, "run_process", run)


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--rehearse", "--output", str(folder), *arguments])
    gpu.main()


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of all parts in their files."""
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in gpu.PARTS}


def settings_for(folder: Path, seconds: float = 1e9) -> Settings:
    options = gpu.parse(["--rehearse", "--output", str(folder)])
    names = (options.device, options.dtype, options.target, options.draft)
    return Settings(*names, True, str(folder), str(folder), deadline=gpu.time.monotonic() + seconds)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.rehearsal
def test_a_rehearsal_measures_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(monkeypatch, tmp_path)
    whole, found = json.loads(capsys.readouterr().out.splitlines()[-1]), kept(tmp_path)
    assert whole["parts"] == found
    assert (whole["device"], whole["dtype"], whole["rehearsed"]) == ("cpu", "float32", True)
    assert (tmp_path / "gpu.png").stat().st_size > 0
    for name, result in found.items():
        assert not {"error", "failed", "left_out", "skipped"} & result.keys(), result
        assert result["seconds"] >= 0
        assert all(result[rows] for rows in ROWS.get(name, ()))
    assert found["device"].keys() > {"torch", "triton", "read_gb_s", "copy_gb_s", "product_tflops"}
    assert all(row["near"] and row["same_bits"] for row in found["kernels"]["kernels"])
    ours = [row for row in found["kernels"]["products"] if row["kind"] == "triton"]
    assert len(ours) == 10
    assert all(row["near"] and row["exact"] for row in ours)
    assert found["target"]["bitwise"]
    assert [row["rows"] for row in found["target"]["steps"]] == [1, 5, 2, 10]
    assert all(row["limit_ms"] > 0 for row in found["draft"]["drafts"])
    runs = [(row["concurrency"], row["kind"]) for row in found["pair"]["runs"]]
    assert runs == [(concurrency, kind) for concurrency in (1, 2) for kind in ("plain", "k2", "k4", "adaptive")]
    assert all(row["exact_match"] == 1 for row in found["pair"]["runs"])
    assert [row["sequences"] for row in found["transformers"]["runs"]] == [1, 2]
    assert {goal["goal"]: goal["met"] for goal in whole["goals"]}["exact match"] is True


def recorder(run: Run) -> tuple[Callable[[], None], torch.Tensor]:
    """Repeats work as a graph would."""
    result = run()

    def replay() -> None:
        result.copy_(run())

    return replay, result


def test_the_pass_of_a_gpu_is_measured_by_kind_and_by_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_kernels(monkeypatch)
    monkeypatch.setattr(forward, "compile_pass", lambda *_: None)
    monkeypatch.setattr(forward, "CudaGraphs", lambda: recorder)
    settings = settings_for(tmp_path)
    for name in ("target", "draft", "profile"):
        assert part.run(name, settings)
    target, draft, profile = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("target", "draft", "profile")
    )
    assert all(row["recorded"] for row in target["steps"])
    assert len(target["products"]) == 5
    assert [(row["rows"], row["products"]) for row in target["steps"]] == [
        (rows, kind) for several in ((1, 5), (2, 10)) for kind in KINDS for rows in several
    ]
    assert all(row["ms"] > 0 and row["steps_ms"] > 0 for row in draft["drafts"])
    assert [(row["rows"], row["how"]) for row in profile["steps"]] == [
        (rows, how) for rows in (1, 2, 10) for how in ("recorded", "launched")
    ]


@pytest.mark.usefixtures("in_this_process")
def test_a_part_that_raises_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(settings: Settings, findings: Findings) -> None:
        findings.add(name="a GPU")
        raise RuntimeError("no such instruction\nand more")

    def broken_in_part(settings: Settings, findings: Findings) -> None:
        findings.attempt(settings, "one", 1, lambda: findings.add_row("drafts", {"sequences": 8, "ms": 3.0}))
        findings.attempt(settings, "another", 1, lambda: 1 // 0)
        findings.attempt(settings, "a long one", 1e6, lambda: 1 // 0)

    monkeypatch.setattr(device_part, "measure", broken)
    monkeypatch.setattr(draft_part, "measure", broken_in_part)
    with pytest.raises(SystemExit, match="failed: device, draft"):
        run_main(monkeypatch, tmp_path, "--parts", "draft,device")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    device, draft = found["parts"]["device"], found["parts"]["draft"]
    assert (device["name"], device["error"]) == ("a GPU", "RuntimeError: no such instruction")
    assert (draft["error"], draft["left_out"]) == ("1 measurements failed", [{"left out": "a long one"}])
    assert draft["failed"] == [{"failed": "another", "error": "ZeroDivisionError: integer division or modulo by zero"}]
    assert [goal["met"] for goal in found["goals"] if goal["measured"] is not None] == [True]


def test_parts_without_time_are_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pair.json").write_text('{"runs": []}')
    run_main(monkeypatch, tmp_path, "--minutes", "0.1")
    found = kept(tmp_path)
    assert all(result["skipped"].startswith("needs ") for result in found.values())
    assert found["pair"]["skipped"] in {f"needs 90 s, and {left} s were left" for left in range(7)}
    assert "pair: needs 90 s" in capsys.readouterr().err


# --- Processes


@pytest.mark.rehearsal
def test_a_part_is_a_process_of_its_own(tmp_path: Path) -> None:
    options = gpu.parse(["--rehearse", "--output", str(tmp_path)])
    result = gpu.run("device", options, str(tmp_path), gpu.time.monotonic() + 600)
    assert result == json.loads((tmp_path / "device.json").read_text())
    assert result["torch"] == torch.__version__
    assert "error" not in result


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("import os; raise SystemExit(int(os.environ['STATUS']))", "its process ended with status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its process ended with status -9"),
        ("import time; time.sleep(60)", "it was not done after 1 s"),
        ("import signal, time; signal.signal(signal.SIGTERM, print); time.sleep(60)", "it was not done after 1 s"),
        ("", None),
    ],
)
def test_how_a_process_ends_is_told(monkeypatch: pytest.MonkeyPatch, program: str, failure: str | None) -> None:
    monkeypatch.setattr(gpu, "ENDING", 0.2)
    assert gpu.run_process([sys.executable, "-c", program], {"STATUS": "3"}, 1) == failure


# --- Figures


def test_gaps_are_those_in_which_nothing_runs() -> None:
    events = [("b", 20.0, 30.0), ("a", 0.0, 10.0), ("a", 5.0, 12.0), ("b", 29.0, 31.0)]
    row, names = times_of(events, layers=2)
    assert (row["kernels"], row["kernels_a_layer"], row["device_us"]) == (4, 2, 31)
    assert (row["idle_us"], row["longest_gap_us"]) == (8, 8)
    assert [(name["name"], name["times"], name["us"]) for name in names] == [("a", 2, 17), ("b", 2, 12)]
    with pytest.raises(RuntimeError, match="nothing run"):
        times_of([], 2)


def test_numbers_of_rows_that_change_bits_are_found() -> None:
    together = torch.arange(10.0)
    counts = counts_that_differ(lambda rows: together[rows] + (rows.start == 7), together, row_counts(10))
    assert counts == [3]
    assert row_counts(2048)[-4:] == [2016, 2017, 2047, 2048]


def test_goals_are_judged_by_the_worst_case() -> None:
    def step(sequences: int, drafted: int, of_limit: float, over_plain: float, kind: str = "chosen") -> dict[str, Any]:
        return {"sequences": sequences, "drafted": drafted, "of_limit": of_limit, "over_plain": over_plain,
                "passes": 1, "products": kind}  # fmt: skip

    steps = [
        step(8, 0, 0.9, 1),
        step(8, 0, 0.6, 1),
        step(8, 4, 0.5, 1.05),
        step(1, 0, 0.8, 1),
        step(1, 0, 0.1, 1, "cublas"),
    ]
    runs = [{"concurrency": 8, "kind": "adaptive", "ratio": 2.5, "exact_match": 1.0}]
    found = {goal["goal"]: goal for goal in goals({"target": {"steps": steps}, "pair": {"runs": runs}})}
    assert found["share of the limit, step of 1"]["measured"] == 0.8
    assert (found["share of the limit, step of 8"]["measured"], found["share of the limit, step of 8"]["met"]) == (
        0.6,
        False,
    )
    assert found["verification of 8 x 5 rows, of a plain step"]["met"]
    assert found["adaptive of plain, 8 at a time"]["met"]
    assert found["passes of 64 x 5 rows"]["met"] is None


# --- Options


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--minutes", "0"),
        ("--minutes", "nan"),
        ("--minutes", "soon"),
        ("--parts", "device,weather"),
        ("--dtype", "int8"),
        ("--target", "huge"),
        ("--draft", "tiny"),
        ("--draft", "tiny-draft"),
        ("--device", "foo"),
        ("--output", __file__),
    ],
)
def test_bad_options_are_refused_by_name(
    tmp_path: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--output", str(tmp_path), "--device", "cpu", flag, value])
    assert f"{flag}: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--output", str(tmp_path)])
    assert "--device: device cuda cannot be used: " in capsys.readouterr().err.splitlines()[-1]
