"""The GPU benchmark runs to its end on a CPU, survives failures of its parts, and computes its figures correctly."""

import json
import signal
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_kernels import imitate_graphs, make_dot_batch_invariant

from benchmarks import shapes
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import part, preflight, processes, steps
from benchmarks.gpu.answers import SERVICES
from benchmarks.gpu.gemms import counts_that_differ, row_counts
from benchmarks.gpu.part import BROKEN, Findings, Settings
from benchmarks.gpu.summary import MAX_LINES, print_summary
from benchmarks.gpu.worker_rounds import WAYS
from benchmarks.report import machine
from specpool.engine.run import pass_selection as forward

pytest.importorskip("triton")

# Lists of rows that each part finds.
ROWS = {
    "exactness": ("exactness",), "mixtures": ("exactness", "steps"),
    "hybrids": ("exactness", "steps", "prefills", "drafts"), "round": ("rounds", "exactness"),
    "pair": ("runs", "logprobs"), "generate": ("generate",), "rows": ("kernels",), "sampling": ("kernels",),
    "attention": ("kernels",), "steps": ("steps",), "draft": ("drafts",), "gemm": ("gemm",),
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

    def run(command: list[str], environment: Mapping[str, str], seconds: float) -> int | None:
        assert environment == {"TRITON_INTERPRET": "1"}
        return part.run(command[3], Settings(**json.loads(command[4])))

    make_dot_batch_invariant(monkeypatch)
    monkeypatch.setattr(processes, "run_process", run)
    monkeypatch.setattr("benchmarks.runs.RECENT_SECONDS", 0.1)  # the coordinator is another process


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--rehearse", "--output", str(folder), *arguments])
    gpu.main()


def read_report(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


def settings_for(folder: Path) -> Settings:
    options = gpu.parse(["--rehearse", "--output", str(folder)])
    names = (options.device, options.dtype, options.target, options.draft)
    return Settings(*names, True, str(folder), str(folder), deadline=gpu.time.monotonic() + 1e9)


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.rehearsal
def test_a_rehearsal_measures_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(monkeypatch, tmp_path, "--minutes", "30")
    assert {file.name for file in tmp_path.iterdir()} == {"report.json"}
    report = read_report(tmp_path)
    results = report["parts"]
    assert (report["device"], report["dtype"], report["rehearsed"]) == ("cpu", "float32", True)
    assert list(results) == list(gpu.PARTS) == ["preflight", *ROWS]
    for name, result in results.items():
        assert not {"error", "failed", "left_out", "skipped"} & result.keys(), result
        assert all(result[rows] for rows in ROWS.get(name, ()))
        assert result["device"] == machine()
    assert results["preflight"].keys() > {"torch", "triton", "read_gb_s", "copy_gb_s", "gemm_tflops"}
    assert results["preflight"]["missing"] == []
    kernels = [row for name in ("attention", "rows", "sampling") for row in results[name]["kernels"]]
    assert all(row["near"] and row["same_bits"] for row in kernels)
    ours = [row for row in results["gemm"]["gemm"] if row["backend"] == "triton"]
    assert len(ours) == 10
    assert all(row["near"] and row["exact"] for row in ours)
    assert all(row["equal"] for row in results["exactness"]["exactness"])
    assert all(row["equal"] for name in ("mixtures", "hybrids", "round") for row in results[name]["exactness"])
    assert [row["bitwise"] for row in results["mixtures"]["self_tests"]] == [True, True]
    rounds = {(row["draft"], row["sequences"], row["way"]) for row in results["round"]["rounds"]}
    assert rounds == {*product(("head", "draft"), (1, 2), ("plain", *WAYS))}
    assert results["steps"]["bitwise"]
    assert [row["rows"] for row in results["steps"]["steps"]] == [1, 5, 2, 10]
    assert all(row["limit_ms"] > 0 and row["same_tokens"] is not False for row in results["draft"]["drafts"])
    runs = [(row["arrangement"], row["concurrency"], row["kind"]) for row in results["pair"]["runs"]]
    assert runs == [*product(SERVICES, (1, 2), ("plain", "k2", "k4", "adaptive"))]
    assert all(row["exact_match"] == 1 for row in results["pair"]["runs"])
    assert "checks  14 of 14 kernels passed" in capsys.readouterr().out


@pytest.mark.slow
def test_the_gpu_pass_is_measured_captured_and_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_graphs(monkeypatch)
    monkeypatch.setattr(forward, "compile_pass", lambda *_: None)
    settings = settings_for(tmp_path)
    results = {}
    for name in ("steps", "draft", "round"):
        assert part.run(name, settings) == 0
        results[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert all(row["captured"] for row in results["steps"]["steps"])
    assert len(results["steps"]["gemm_backends"]) == 5
    assert [row["rows"] for row in results["steps"]["steps"]] == [1, 5, 2, 10]
    assert all(row["ms"] > 0 and row["steps_ms"] > 0 and row["same_tokens"] for row in results["draft"]["drafts"])
    assert all(row["equal"] for row in results["round"]["exactness"])
    drafting = [row for row in results["round"]["rounds"] if row["way"] != "plain"]
    assert all(row["on_device"] == ("device" in row["way"]) and row["same_drafts"] == 1 for row in drafting)
    parts = ("prepare", "target", "choose", "draft", "steps", "copy", "launched", "synced", "reply")
    assert all(row[f"{name}_ms"] > 0 for row in drafting for name in parts)


# --- Failures


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

    monkeypatch.setattr(preflight, "measure_preflight", broken)
    monkeypatch.setattr(steps, "measure_drafts", partly_broken)
    with pytest.raises(SystemExit, match="failed: preflight, draft"):
        run_main(monkeypatch, tmp_path, "--parts", "draft,preflight")
    report = read_report(tmp_path)
    first, draft = report["parts"]["preflight"], report["parts"]["draft"]
    assert (first["name"], first["error"]) == ("a GPU", "RuntimeError: no such instruction")
    assert (draft["error"], draft["left_out"]) == ("1 measurements failed", [{"left out": "a long one"}])
    assert draft["failed"] == [{"failed": "another", "error": "ZeroDivisionError: integer division or modulo by zero"}]
    assert "FAILED  draft: another: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.usefixtures("_in_this_process")
def test_a_part_continues_behind_the_measurement_that_broke_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def measure(settings: Settings, findings: Findings) -> None:
        for name in ("one", "two", "three"):
            findings.attempt(settings, name, 1, lambda name=name: break_in_two(name))

    def break_in_two(name: str) -> None:
        calls.append(name)
        if name == "two":
            raise RuntimeError("illegal memory access")

    monkeypatch.setattr(steps, "measure_drafts", measure)
    monkeypatch.setattr(part, "is_broken", lambda device: True)
    result = processes.run_part("draft", settings_for(tmp_path), 100, 1)
    assert calls == result["attempted"] == ["one", "two", "three"]
    assert result["failed"] == [{"failed": "two", "error": "RuntimeError: illegal memory access"}]
    assert result["error"] == "1 measurements failed"


def test_a_part_continues_behind_the_measurement_that_crashed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = [-11, 0]

    def run(*_: object) -> int:
        Findings(tmp_path / "gemm.json").add_row("attempted", f"case {len(statuses)}")
        return statuses.pop(0)

    monkeypatch.setattr(processes, "run_process", run)
    result = processes.run_part("gemm", settings_for(tmp_path), 100, 1)
    assert result["attempted"] == ["case 2", "case 1"]
    assert result["failed"] == [{"failed": "case 2", "error": "exited with status -11"}]


@pytest.mark.parametrize(
    ("status", "reason"),
    [(-9, "exited with status -9"), (BROKEN, "exited with status 3"), (None, "not done after 100 s")],
)
def test_a_part_without_progress_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, reason: str
) -> None:
    statuses = [status]
    monkeypatch.setattr(processes, "run_process", lambda *_: statuses.pop())
    assert processes.run_part("gemm", settings_for(tmp_path), 100, 1)["error"] == reason


def test_parts_without_time_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pair.json").write_text('{"runs": []}')
    run_main(monkeypatch, tmp_path, "--minutes", "0.1")
    results = read_report(tmp_path)["parts"]
    assert list(results) == list(gpu.PARTS)
    assert all(result["skipped"].startswith("needs ") for result in results.values())
    needed = gpu.PARTS["pair"][0]
    assert results["pair"]["skipped"] in {f"needs {needed} s, but {left} s were left" for left in range(7)}
    assert f"pair: needs {needed} s" in capsys.readouterr().err


@pytest.mark.usefixtures("_in_this_process")
def test_a_resumed_run_keeps_results_and_continues_the_part_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, skipped = {"name": "a GPU"}, {"skipped": "needs 20 s, but 0 s were left"}
    (tmp_path / "report.json").write_text(json.dumps({"parts": {"preflight": kept, "gemm": skipped}}))
    (tmp_path / "draft.json").write_text('{"attempted": ["one"], "drafts": []}')

    def measure(settings: Settings, findings: Findings) -> None:
        for name in ("one", "two"):
            findings.attempt(settings, name, 1, lambda: None)

    for module in ("gemms:measure_gemms", "steps:measure_drafts"):
        monkeypatch.setattr(f"benchmarks.gpu.{module.replace(':', '.')}", measure)
    run_main(monkeypatch, tmp_path, "--resume", "--parts", "preflight,gemm,draft")
    results = read_report(tmp_path)["parts"]
    assert results["preflight"] == kept
    assert results["gemm"]["attempted"] == ["one", "two"]
    assert results["draft"]["attempted"] == ["one", "two"]
    assert "drafts" in results["draft"]


@pytest.mark.rehearsal
def test_a_part_runs_in_its_own_process(tmp_path: Path) -> None:
    result = processes.run_part("rows", settings_for(tmp_path), 600, 1)
    assert len(result["kernels"]) == 6
    assert "error" not in result


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import os; raise SystemExit(int(os.environ['STATUS']))", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import signal, time; signal.signal(signal.SIGTERM, print); time.sleep(60)", None),
        ("", 0),
    ],
)
def test_a_process_has_a_time_limit(monkeypatch: pytest.MonkeyPatch, program: str, status: int | None) -> None:
    monkeypatch.setattr(processes, "ENDING", 0.2)
    assert processes.run_process([sys.executable, "-c", program], {"STATUS": "3"}, 1) == status


# --- Figures


def test_row_counts_that_change_bits_are_found() -> None:
    together = torch.arange(10.0)
    counts = counts_that_differ(lambda rows: together[rows] + (rows.start == 7), together, row_counts(10))
    assert counts == [3]
    assert row_counts(2048)[-4:] == [2016, 2017, 2047, 2048]


def test_the_summary_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [{"failed": f"case {i}", "error": "x" * 500} for i in range(50)]
    times = {f"us_of_{rows}": 12.5 for rows in (1, 8, 40, 320)}
    gemms = [
        {"gemm": f"shape {i // 2}", "backend": "triton", "exact": True, "near": True, "as_triton": not i, **times}
        for i in range(20)
    ]
    case = {"arrangement": "colocated", "concurrency": 8, "kind": "k4"}
    runs = [{**case, "ratio": 1.5, "tokens_per_s": 1.0, "round_ms": 9.5, "exact_match": 1.0}] * 40
    results: dict[str, Any] = {name: {"failed": failed, "error": "50 measurements failed"} for name in gpu.PARTS}
    results["gemm"]["gemm"], results["pair"]["runs"] = gemms, runs
    results["round"]["rounds"] = [{"draft": "head", "sequences": 8, "way": "host", "reply_ms": 7.25, "waits": 1}]
    print_summary(results)
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES
    assert len(text) < 12_000
    assert [line.split() for line in lines if "reply" in line or "head" in line] == [
        ["draft", "sequences", "way", "reply", "over", "plain", "tokens", "a", "round", "prepare", "target", "choose",
         "draft", "steps", "copy", "launched", "synced", "waits"],
        ["head", "8", "host", "7.25", "1"],
    ]  # fmt: skip
    assert "gemm    shape 0, us: triton exact 12.5 12.5 12.5 12.5; triton exact OTHER BITS 12.5 12.5 12.5 12.5" in lines


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
