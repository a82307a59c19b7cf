"""The benchmark of generation memory: its options, and a small run on the real pair."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import memory


def test_chats_consist_of_consecutive_prompts(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question_id": i, "turns": [f"question {i}"]}) + "\n" for i in range(3)))
    options = memory.parse(["--prompts", str(file), "--chats", "2", "--turns", "2"])
    assert options.questions == [["question 0", "question 1"], ["question 2", "question 0"]]
    assert options.limits == ["none", "1200MiB", "1100MiB"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--limits", "none,900MX"], "'900MX' is neither none nor a size such as 900MiB"),
        (["--prompts", "missing.jsonl"], "--prompts: "),
        (["--chats", "0"], "'0' is not an integer from 1 to 10000"),
    ],
)
def test_bad_options_are_named(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        memory.parse(flags)
    assert problem in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.real_pair
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_limit_changes_no_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--limits", "none,1200MiB", "--chats", "1", "--tokens", "8", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["memory", *flags])
    memory.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["system"] for row in rows] == ["limit none", "limit 1200MiB", "assisted generation"]
    assert all(row["generation_mib"] > 0 for row in rows)
    assert rows[1]["same_tokens"]
