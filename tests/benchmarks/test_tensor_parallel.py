"""The benchmark of ranks: its tables, a rehearsal with a tiny model, and the documented estimate."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import load_engine, random_tokens, save_model
from tiny_pair import tiny_config

from benchmarks import tensor_parallel, tensor_parallel_estimate
from benchmarks.sharded_engine import Answers, Kind, Memory, Start, Timing, by_drafts, one_by_one
from benchmarks.tensor_parallel import Measured, kinds_of

ALONE = Measured(
    Kind(1, None, 2), start=Start(1.04, True, 150 << 20), plain=Answers([[1, 2]], "a"), drafted=Answers([[1, 2]], "a"),
    timings={"1 sequence": [Timing(0.02, 0, 0.0)]}, memory=Memory([100 << 20], [300 << 20]),
)  # fmt: skip
PARTS = replace(
    ALONE,
    kind=Kind(2, "parts", 1), plain=Answers([[1, 2]], "b"), drafted=Answers([[1, 3]], "b"),
    timings={"1 sequence": [Timing(0.01, 62, 0.002), Timing(0.04, 62, 0.012), Timing(0.02, 62, 0.001)]},
    memory=Memory([52 << 20, 48 << 20], [210 << 20, 190 << 20]),
)  # fmt: skip


def test_ranks_share_the_threads() -> None:
    sharded = [Kind(ranks, sums, 1) for ranks in (2, 3) for sums in ("whole", "parts")]
    assert kinds_of([2, 3], 2) == [Kind(1, None, 2), Kind(1, None, 1), *sharded]
    assert [kind.threads for kind in kinds_of([1, 2, 4], 8)] == [8, 4, 2, 4, 4, 2, 2]
    assert kinds_of([1], 1) == [Kind(1, None, 1)]


def test_tables_have_medians_the_largest_rank_and_differences() -> None:
    named = {"ranks": 2, "sums": "parts", "threads each": 1}
    assert tensor_parallel.times(PARTS) == {**named, "1 sequence": 20.0}
    assert tensor_parallel.exchanges(PARTS) == {**named, "count": 62, "1 sequence, %": 20.0}
    assert list(tensor_parallel.memory(PARTS, ALONE).values())[3:] == ["52 + 48", 0.52, "210 + 190", 0.7, "150", 1.0]
    found = tensor_parallel.equality(PARTS, ALONE)
    assert (found["plain ids"], found["plain logits"]) == ("equal", "differ")
    assert (found["speculative ids"], found["speculative = own plain"]) == ("differ", "differ")
    assert set(list(tensor_parallel.equality(ALONE, ALONE).values())[4:]) == {"equal"}


def test_wrong_drafts_change_no_bit(tmp_path: Path) -> None:
    engine = load_engine(save_model(tmp_path, tiny_config()), device="cpu")
    prompts = [random_tokens(length, seed=length) for length in (3, 9)]
    plain = one_by_one(engine, prompts, 11)
    passes = engine.passes
    assert by_drafts(engine, prompts, plain.token_ids) == plain
    assert engine.passes - passes == 4  # the prompts, then 1 to 4 tokens a round
    assert by_drafts(engine, prompts, [[token + 1 for token in answer] for answer in plain.token_ids]) == plain


@pytest.mark.rehearsal
def test_ranks_are_measured_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path, tiny_config())
    flags = ["--threads", "1", "--repeats", "1", "--steps", "1", "--num-prompts", "2", "--max-tokens", "6"]
    arguments = ["--model", str(folder), *flags, "--output", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", ["tensor_parallel", *arguments])
    tensor_parallel.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "results" / "tensor_parallel.json").read_text()) == result
    assert [(row["ranks"], row["sums"]) for row in result["passes"]] == [(1, None), (2, "whole"), (2, "parts")]
    assert [row["count"] for row in result["collectives"]] == [3 * 4 + 2, 3 * 2 + 2]
    assert all(0 < row["1 sequence, %"] < 100 for row in result["collectives"])
    assert all(0.4 < row["weights, part"] < 0.7 for row in result["memory"][1:])
    alone, whole, parts = result["equality"]
    assert {row["self-test"] for row in result["equality"]} == {"bitwise"}
    assert all(set(list(row.values())[4:]) == {"equal"} for row in (alone, whole))
    assert parts["speculative = own plain"] == "equal"


def test_estimate_has_the_documented_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["estimate"])
    tensor_parallel_estimate.main()
    printed = capsys.readouterr()
    assert "Nothing was run on a GPU" in printed.err
    rows = json.loads(printed.out.splitlines()[-1])["rows"]
    found = {(row["rows"], row["devices"], row["sums"]): row for row in rows}
    assert [found[count, 1, None]["total_ms"] for count in (1, 8, 64)] == pytest.approx([41.6, 42.3, 47.9], abs=0.05)
    assert [found[8, 8, sums]["total_ms"] for sums in ("whole", "parts")] == pytest.approx([8.7, 7.3], abs=0.05)
    assert [found[2048, 8, sums]["total_ms"] for sums in ("whole", "parts")] == pytest.approx([82, 142], abs=0.5)
    assert [found[8, 8, sums]["exchange_%"] for sums in ("whole", "parts")] == pytest.approx([39, 28], abs=0.5)
    assert [found[8, 8, sums]["gathers"] for sums in ("whole", "parts")] == [322, 162]
