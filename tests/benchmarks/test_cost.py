"""The cost benchmark: each part that needs no real pair runs to its end on a small load."""

import json
from pathlib import Path

import pytest

from benchmarks.cost import __main__ as cost
from benchmarks.cost import metrics, overlap

LOAD = ["--sequences", "2", "--tokens", "6", "--repeats", "1"]


@pytest.mark.parametrize(
    ("part", "flags", "measures"),
    [
        ("overlap", ["--tokens", "6"], ["rows"]),
        ("sampling", ["--rows", "2", "--vocab-size", "8000", "--repeats", "1"], ["costs", "compiled"]),
        pytest.param("coordinator", LOAD, ["round_ms", "choose_group_of_10000_ms"], marks=pytest.mark.slow),
        pytest.param("metrics", LOAD, ["observe_a_commit_us", "scrape_cpu_ms"], marks=pytest.mark.slow),
        pytest.param("tracing", LOAD, ["off_ms", "on_ms"], marks=pytest.mark.slow),
    ],
)
def test_part_ends_in_json(
    part: str,
    flags: list[str],
    measures: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(overlap, "CONCURRENCIES", (1,))
    monkeypatch.setattr(metrics, "SCRAPES", 1)
    cost.main(["--of", part, *flags])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(result[measure] for measure in measures)


def test_drafts_are_measured_with_and_without_the_loop(
    tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--draft", str(tiny_pair[1]), "--sequences", "1,2", "--repeats", "1", "--prompt", "8", "--k", "2"]
    cost.main(["--of", "draft", *flags])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["sequences"] for row in rows] == 4 * [1, 2]
    assert all(row["loop_ms"] > 0 and row["steps_ms"] > 0 for row in rows)
