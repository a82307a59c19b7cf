"""The benchmark of several target workers runs to its end on a small load, and compares with the smallest number."""

import json
import sys

import pytest

from benchmarks import lanes


def test_ratios_are_those_to_the_fewest_targets() -> None:
    runs = {2: [{"tokens_per_s": 100.0, "cpu_ms": 1.0}], 4: [{"tokens_per_s": 190.0, "cpu_ms": 1.0}]}
    assert [row["of_ideal"] for row in lanes.rows_of(runs)] == [1.0, 0.95]


def test_small_run_ends_in_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--targets", "1,2", "--sequences", "2", "--tokens", "6", "--repeats", "1", "--verify-ms", "1", "0"]
    monkeypatch.setattr(sys, "argv", ["lanes", *flags])
    lanes.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["targets"] for row in rows] == [1, 2]
    assert all(row["tokens_per_s"] > 0 and row["cpu_ms"] > 0 for row in rows)
