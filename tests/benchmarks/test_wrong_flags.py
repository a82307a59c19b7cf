"""Benchmarks that are told something wrong: one line that names the flag, before anything is started."""

from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import dashboard

COSTS = ("coordinator_cost", "metrics_cost", "tracing_cost")


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize(
    ("flag", "limits"),
    [
        ("--sequences=0", "1 to 256"),
        ("--tokens=0", "1 to 4000"),
        ("--k=-1", "0 to 16"),
        ("--repeats=0", "1 to 1000"),
    ],
)
def test_a_load_has_limits(
    name: str, flag: str, limits: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, flag])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    key, value = flag.split("=")
    assert f"{name}: error: argument {key}: '{value}' is not an integer from {limits}\n" in capsys.readouterr().err


def refusal_of_dashboard(monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    """What the drawing of the dashboard ends with."""
    monkeypatch.setattr("sys.argv", ["dashboard", *flags])
    with pytest.raises(SystemExit) as ended:
        dashboard.main()
    return ended.value.code


@pytest.mark.parametrize("prometheus", ["nothing", "http://a b", "http://127.0.0.1:1"])
def test_a_prometheus_that_does_not_answer_is_named(prometheus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = str(refusal_of_dashboard(monkeypatch, "--prometheus", prometheus))
    assert refusal.startswith(f"dashboard: --prometheus {prometheus}: ")
    assert "\n" not in refusal


@pytest.mark.parametrize("minutes", ["0", "nan", "1e9"])
def test_a_dashboard_shows_some_time(
    minutes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal_of_dashboard(monkeypatch, "--minutes", minutes) == 2
    assert "is not from 1 to 43200" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["nowhere/a.png", "a.nothing"])
def test_a_picture_that_cannot_be_written(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "answers", lambda *_: [])
    path = str(tmp_path / output)
    assert str(refusal_of_dashboard(monkeypatch, "--output", path)).startswith(f"dashboard: --output {path}: ")
