"""Figures of the benchmark with vLLM, from runs that are made up."""

from typing import Any

import pytest

from benchmarks import vllm


def run(seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "outputs": [[1, 2, 3, 4]], "seconds": seconds, "steps": 4, "draft_tokens": 0, "accepted": 0,
        "asked": 0, "waited": 0.0, "passes": 0.0, "alone": 0.0, **more,
    }  # fmt: skip


def test_ratios_are_taken_within_a_repeat_and_the_first_run_is_apart() -> None:
    drafting = {"draft_tokens": 4, "accepted": 3, "asked": 2, "waited": 0.3, "passes": 0.2, "alone": 0.1}
    runs = {
        "plain": [run(8.0), run(1.0), run(2.0), run(4.0)],
        "remote": [run(16.0), *(run(seconds, **drafting) for seconds in (1.0, 1.0, 2.0))],
    }
    plain, remote = vllm.summaries(runs, 1)
    assert (plain["ratio"], plain["tokens_per_s"]) == (1.0, 2.0)
    assert [remote[name] for name in ("ratio_first", "ratio", "ratio_min", "ratio_max")] == [0.5, 2.0, 1.0, 2.0]
    assert [remote[name] for name in ("accepted", "asked", "waited_ms", "alone_ms")] == [0.75, 0.5, 75.0, 25.0]
    assert remote["ratio_of_two_devices"] == pytest.approx(4 / 1.9, abs=1e-3)
    assert remote["ratio_of_free_drafts"] == pytest.approx(4 / 1.7, abs=1e-3)


@pytest.mark.parametrize("flag", ["--concurrency=0", "--concurrency=1,257", "--tokens=1", "--repeats=0"])
def test_wrong_flags_are_named(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["vllm", flag])
    with pytest.raises(SystemExit) as ended:
        vllm.main()
    assert ended.value.code == 2
    assert f"error: argument {flag.split('=')[0]}: " in capsys.readouterr().err


def test_a_vllm_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SPECPOOL_VLLM_PYTHON", "/nowhere/python")
    monkeypatch.setattr("sys.argv", ["vllm"])
    with pytest.raises(SystemExit):
        vllm.main()
    assert "/nowhere/python: no Python with vLLM" in capsys.readouterr().err
