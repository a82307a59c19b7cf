"""The benchmark of ranks: what it compares, what it refuses, and a rehearsal with a tiny model to the end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import load_engine, random_tokens, save_model
from tiny_pair import tiny_config

from benchmarks import engine_answers, tensor_parallel
from benchmarks.divided_engine import Kind, Memory, Start, Timing
from benchmarks.engine_answers import Answers
from benchmarks.tensor_parallel import Measured, kinds_of

ALONE = Measured(
    Kind(1, None, 2),
    start=Start(1.04, True, 150 << 20),
    plain=Answers([[1, 2]], "a"),
    drafted=Answers([[1, 2]], "a"),
    timings={"1 sequence": [Timing(0.02, 0, 0.0)]},
    memory=Memory([100 << 20], [300 << 20]),
)
PARTS = replace(
    ALONE,
    kind=Kind(2, "parts", 1),
    plain=Answers([[1, 2]], "b"),
    drafted=Answers([[1, 3]], "b"),
    timings={"1 sequence": [Timing(0.01, 62, 0.002), Timing(0.04, 62, 0.012), Timing(0.02, 62, 0.001)]},
    memory=Memory([52 << 20, 48 << 20], [210 << 20, 190 << 20]),
)


def test_ranks_share_the_threads() -> None:
    assert kinds_of([2, 3], 2) == [
        Kind(1, None, 2),
        Kind(1, None, 1),
        *(Kind(ranks, sums, 1) for ranks in (2, 3) for sums in ("whole", "parts")),
    ]
    assert [kind.threads for kind in kinds_of([1, 2, 4], 8)] == [8, 4, 2, 4, 4, 2, 2]
    assert kinds_of([1], 1) == [Kind(1, None, 1)]


def test_a_table_has_medians_and_the_largest_rank() -> None:
    named = {"ranks": 2, "sums": "parts", "threads each": 1}
    assert tensor_parallel.times(PARTS) == {**named, "1 sequence": 20.0}
    assert tensor_parallel.exchanges(PARTS) == {**named, "count": 62, "1 sequence, %": 20.0}
    assert tensor_parallel.memory(PARTS, ALONE) == {
        **named,
        "weights": "52 + 48",
        "weights, part": 0.52,
        "resident": "210 + 190",
        "resident, part": 0.7,
        "rank 0 before loading": "150",
        "seconds to load": 1.0,
    }


def test_differences_are_told() -> None:
    found = tensor_parallel.equality(PARTS, ALONE)
    assert (found["plain ids"], found["plain logits"]) == ("equal", "differ")
    assert (found["speculative ids"], found["speculative = own plain"]) == ("differ", "differ")
    assert set(list(tensor_parallel.equality(ALONE, ALONE).values())[4:]) == {"equal"}


def test_drafts_change_no_bit_though_some_are_wrong(tmp_path: Path) -> None:
    engine = load_engine(save_model(tmp_path, tiny_config()), device="cpu")
    prompts = [random_tokens(length, seed=length) for length in (3, 9)]
    before = engine.tokens
    plain = engine_answers.one_by_one(engine, prompts, 11)
    assert engine.tokens - before == 12 + 2 * 10
    passes = engine.passes
    assert engine_answers.by_drafts(engine, prompts, plain.token_ids) == plain
    assert engine.passes - passes == 4  # the prompts, then 1 to 4 tokens a round
    other = [[token + 1 for token in answer] for answer in plain.token_ids]
    assert engine_answers.by_drafts(engine, prompts, other) == plain


def test_what_cannot_be_divided_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path, tiny_config())
    monkeypatch.setattr("sys.argv", ["tensor_parallel", "--model", str(folder), "--ranks", "3"])
    with pytest.raises(SystemExit):
        tensor_parallel.main()
    refusal = capsys.readouterr().err.splitlines()[-1]
    assert "--ranks: " in refusal
    assert "tensor_parallel 3 is more than the 2 KV heads" in refusal


@pytest.mark.rehearsal
def test_ranks_are_measured_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path, tiny_config())
    flags = ["--threads", "1", "--repeats", "1", "--steps", "1", "--num-prompts", "2", "--max-tokens", "6"]
    monkeypatch.setattr(
        "sys.argv", ["tensor_parallel", "--model", str(folder), *flags, "--output", str(tmp_path / "results")]
    )
    tensor_parallel.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "results" / "tensor_parallel.json").read_text()) == result
    assert [(row["ranks"], row["sums"]) for row in result["passes"]] == [(1, None), (2, "whole"), (2, "parts")]
    assert [row["count"] for row in result["collectives"]] == [3 * 4 + 2, 3 * 2 + 2]
    assert all(0 < row["1 sequence, %"] < 100 for row in result["collectives"])
    assert [row["weights"].count("+") for row in result["memory"]] == [0, 1, 1]
    assert all(0.4 < row["weights, part"] < 0.7 for row in result["memory"][1:])
    alone, whole, parts = result["equality"]
    assert {row["self-test"] for row in result["equality"]} == {"bitwise"}
    assert all(set(list(row.values())[4:]) == {"equal"} for row in (alone, whole))
    assert parts["speculative = own plain"] == "equal"
