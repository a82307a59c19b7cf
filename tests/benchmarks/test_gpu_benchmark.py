"""The GPU benchmark runs to its end on a CPU, survives failures of its parts, and computes its figures correctly."""

import json
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_kernels import FakeGraphs, imitate_kernels, make_dot_batch_invariant

from benchmarks import shapes
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import part, steps
from benchmarks.gpu.kernels import counts_that_differ, row_counts
from benchmarks.gpu.part import Findings, Settings
from specpool.engine.run import pass_selection as forward

pytest.importorskip("triton")

BACKENDS = ("chosen", "triton", "cublas")
# Lists of rows that each part finds.
ROWS = {
    "kernels": ("kernels", "gemm"), "target": ("steps",), "draft": ("drafts",), "pair": ("runs",),
    "transformers": ("runs",), "profile": ("steps", "names"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, shape in part.TINY_SHAPES.items():
        monkeypatch.setitem(shapes.SHAPES, name, shape)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run parts here, to save their imports."""

    def run(command: list[str], environment: Mapping[str, str], seconds: float) -> str | None:
        assert environment == {"TRITON_INTERPRET": "1"}
        return None if part.run(command[3], Settings(**json.loads(command[4]))) else "status 1"

    make_dot_batch_invariant(monkeypatch)
    monkeypatch.setattr(gpu, "run_process", run)


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--rehearse", "--output", str(folder), *arguments])
    gpu.main()


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in gpu.PARTS}


def settings_for(folder: Path) -> Settings:
    options = gpu.parse(["--rehearse", "--output", str(folder)])
    names = (options.device, options.dtype, options.target, options.draft)
    return Settings(*names, True, str(folder), str(folder), deadline=gpu.time.monotonic() + 1e9)


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.rehearsal
def test_a_rehearsal_measures_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(monkeypatch, tmp_path)
    report, results = json.loads(capsys.readouterr().out.splitlines()[-1]), read_results(tmp_path)
    assert report["parts"] == results
    assert (report["device"], report["dtype"], report["rehearsed"]) == ("cpu", "float32", True)
    assert (tmp_path / "gpu.png").stat().st_size > 0
    for name, result in results.items():
        assert not {"error", "failed", "left_out", "skipped"} & result.keys(), result
        assert all(result[rows] for rows in ROWS.get(name, ()))
    assert results["device"].keys() > {"torch", "triton", "read_gb_s", "copy_gb_s", "gemm_tflops"}
    assert all(row["near"] and row["same_bits"] for row in results["kernels"]["kernels"])
    ours = [row for row in results["kernels"]["gemm"] if row["backend"] == "triton"]
    assert len(ours) == 10
    assert all(row["near"] and row["exact"] for row in ours)
    assert results["target"]["bitwise"]
    assert [row["rows"] for row in results["target"]["steps"]] == [1, 5, 2, 10]
    assert all(row["limit_ms"] > 0 for row in results["draft"]["drafts"])
    runs = [(row["concurrency"], row["kind"]) for row in results["pair"]["runs"]]
    assert runs == [(concurrency, kind) for concurrency in (1, 2) for kind in ("plain", "k2", "k4", "adaptive")]
    assert all(row["exact_match"] == 1 for row in results["pair"]["runs"])
    assert [row["sequences"] for row in results["transformers"]["runs"]] == [1, 2]
    assert {goal["goal"]: goal["met"] for goal in report["goals"]}["exact match"] is True


@pytest.mark.slow
def test_the_gpu_pass_is_measured_by_backend_captured_and_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_kernels(monkeypatch)
    monkeypatch.setattr(forward, "compile_pass", lambda *_: None)
    monkeypatch.setattr(forward, "CudaGraphs", FakeGraphs)
    settings = settings_for(tmp_path)
    results = {}
    for name in ("target", "draft", "profile"):
        assert part.run(name, settings)
        results[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert all(row["captured"] for row in results["target"]["steps"])
    assert len(results["target"]["gemm_backends"]) == 5
    assert [(row["rows"], row["backend"]) for row in results["target"]["steps"]] == [
        (rows, backend) for pair in ((1, 5), (2, 10)) for backend in BACKENDS for rows in pair
    ]
    assert all(row["ms"] > 0 and row["steps_ms"] > 0 for row in results["draft"]["drafts"])
    assert [(row["rows"], row["how"]) for row in results["profile"]["steps"]] == [
        (rows, how) for rows in (1, 2, 10) for how in ("captured", "eager")
    ]


@pytest.mark.usefixtures("_in_this_process")
def test_a_failing_part_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(settings: Settings, findings: Findings) -> None:
        findings.add(name="a GPU")
        raise RuntimeError("no such instruction\nand more")

    def partly_broken(settings: Settings, findings: Findings) -> None:
        findings.attempt(settings, "one", 1, lambda: findings.add_row("drafts", {"sequences": 8, "ms": 3.0}))
        findings.attempt(settings, "another", 1, lambda: 1 // 0)
        findings.attempt(settings, "a long one", 1e6, lambda: 1 // 0)

    monkeypatch.setattr(steps, "measure_device", broken)
    monkeypatch.setattr(steps, "measure_drafts", partly_broken)
    with pytest.raises(SystemExit, match="failed: device, draft"):
        run_main(monkeypatch, tmp_path, "--parts", "draft,device")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    device, draft = report["parts"]["device"], report["parts"]["draft"]
    assert (device["name"], device["error"]) == ("a GPU", "RuntimeError: no such instruction")
    assert (draft["error"], draft["left_out"]) == ("1 measurements failed", [{"left out": "a long one"}])
    assert draft["failed"] == [{"failed": "another", "error": "ZeroDivisionError: integer division or modulo by zero"}]
    assert [goal["met"] for goal in report["goals"] if goal["measured"] is not None] == [True]


def test_parts_without_time_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pair.json").write_text('{"runs": []}')
    run_main(monkeypatch, tmp_path, "--minutes", "0.1")
    results = read_results(tmp_path)
    assert all(result["skipped"].startswith("needs ") for result in results.values())
    assert results["pair"]["skipped"] in {f"needs 90 s, but {left} s were left" for left in range(7)}
    assert "pair: needs 90 s" in capsys.readouterr().err


@pytest.mark.rehearsal
def test_a_part_runs_in_its_own_process(tmp_path: Path) -> None:
    options = gpu.parse(["--rehearse", "--output", str(tmp_path)])
    result = gpu.run("device", options, str(tmp_path), gpu.time.monotonic() + 600)
    assert result == json.loads((tmp_path / "device.json").read_text())
    assert result["torch"] == torch.__version__
    assert "error" not in result


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("import os; raise SystemExit(int(os.environ['STATUS']))", "exited with status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exited with status -9"),
        ("import signal, time; signal.signal(signal.SIGTERM, print); time.sleep(60)", "not done after 1 s"),
        ("", None),
    ],
)
def test_failures_of_a_process_are_reported(monkeypatch: pytest.MonkeyPatch, program: str, failure: str | None) -> None:
    monkeypatch.setattr(gpu, "ENDING", 0.2)
    assert gpu.run_process([sys.executable, "-c", program], {"STATUS": "3"}, 1) == failure


# --- Figures


def test_gaps_of_a_profile_are_times_when_nothing_runs() -> None:
    events = [("b", 20.0, 30.0), ("a", 0.0, 10.0), ("a", 5.0, 12.0), ("b", 29.0, 31.0)]
    row, names = steps.summarize(events, layers=2)
    assert (row["kernels"], row["kernels_a_layer"], row["device_us"]) == (4, 2, 31)
    assert (row["idle_us"], row["longest_gap_us"]) == (8, 8)
    assert [(name["name"], name["times"], name["us"]) for name in names] == [("a", 2, 17), ("b", 2, 12)]
    with pytest.raises(RuntimeError, match="nothing run"):
        steps.summarize([], 2)


def test_row_counts_that_change_bits_are_found() -> None:
    together = torch.arange(10.0)
    counts = counts_that_differ(lambda rows: together[rows] + (rows.start == 7), together, row_counts(10))
    assert counts == [3]
    assert row_counts(2048)[-4:] == [2016, 2017, 2047, 2048]


def test_goals_are_judged_by_the_worst_case() -> None:
    columns = ("sequences", "drafted", "of_limit", "over_plain", "backend")
    cases = [(8, 0, 0.9, 1, "chosen"), (8, 0, 0.6, 1, "chosen"), (8, 4, 0.5, 1.05, "chosen"), (1, 0, 0.8, 1, "chosen"),
             (1, 0, 0.1, 1, "cublas")]  # fmt: skip
    measured_steps = [{**dict(zip(columns, case, strict=True)), "passes": 1} for case in cases]
    runs = [{"concurrency": 8, "kind": "adaptive", "ratio": 2.5, "exact_match": 1.0}]
    results = {"target": {"steps": measured_steps}, "pair": {"runs": runs}}
    goals = {goal["goal"]: (goal["measured"], goal["met"]) for goal in gpu.goals(results)}
    assert goals["share of the limit, step of 1"] == (0.8, True)
    assert goals["share of the limit, step of 8"] == (0.6, False)
    assert goals["verification of 8 x 5 rows, of a plain step"] == (1.05, True)
    assert goals["adaptive of plain, 8 at a time"] == (2.5, True)
    assert goals["passes of 64 x 5 rows"] == (None, None)


# --- Options


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--minutes", value) for value in ("0", "nan", "soon")),
        ("--parts", "device,weather"),
        ("--dtype", "int8"),
        ("--target", "huge"),
        ("--draft", "tiny-draft"),
        ("--device", "foo"),
        ("--output", __file__),
    ],
)
def test_invalid_options_are_named(tmp_path: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--output", str(tmp_path), "--device", "cpu", flag, value])
    assert f"{flag}: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--output", str(tmp_path)])
    assert "--device: device cuda cannot be used: " in capsys.readouterr().err.splitlines()[-1]
