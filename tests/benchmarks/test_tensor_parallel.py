"""The benchmark of ranks: its tables, a rehearsal with a tiny model, and the estimate against sums by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import load_engine, random_tokens, save_model
from tiny_pair import tiny_config

from benchmarks import tensor_parallel, tensor_parallel_estimate
from benchmarks.sharded_engine import Answers, Kind, Memory, Start, Timing, by_drafts, one_by_one
from benchmarks.tensor_parallel import Measured, kinds_of
from benchmarks.tensor_parallel_estimate import Estimate, Hardware, Shapes, Work, rows_of
from specpool.engine.sharding.shares import Sums

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


# 10 layers of 200 weights; rates of one byte or operation per millisecond.
SHAPES = Shapes(layers=10, hidden=5, intermediate=8, heads=2, kv_heads=2, head_dim=2, vocabulary=100)
HARDWARE = Hardware(memory_tb_s=1e-9, peak_tflops=1e-9, link_gb_s=2e-6, link_fraction=0.5, latency_us=1000)


def estimate(work: Work, devices: int, sums: Sums = "whole") -> Estimate:
    return Estimate(SHAPES, HARDWARE, work, devices, sums)


def test_estimate_of_one_device() -> None:
    whole = Estimate(Shapes(), Hardware(), Work(1, 1, 0), 1, "whole")
    assert whole.weight_bytes == pytest.approx(2 * 70.55e9, rel=1e-3)
    assert Shapes().cached_values == 163_840
    assert whole.total_ms == pytest.approx(1e3 * (whole.weight_bytes - 2 * 128_256 * 8192) / 3.35e12)
    alone = estimate(Work(3, 1, 7), 1)
    assert (alone.collectives, alone.total_ms) == (0, alone.device_ms)


def test_estimate_of_reading_computing_and_collectives() -> None:
    layers, head, cached, rows, logits = 10 * 200, 100 * 5, 2 * 10 * 4, 3, 2
    assert estimate(Work(1, 1, 6), 1).device_ms == pytest.approx(2 * (layers + head + 6 * cached))
    assert estimate(Work(9, 2, 0), 2).device_ms == pytest.approx(2 * (layers * 9 + head * 2) / 2)
    received = {
        "whole": rows * 10 * (4 + 5 + 8 + 5) * 3 / 4 + rows * 5 * 3 + logits * 100 * 3 / 4,
        "parts": rows * 10 * 2 * 5 * 3 + rows * 5 * 3 + logits * 100 * 3 / 4,
    }
    for sums, collectives in (("whole", 42), ("parts", 22)):
        found = estimate(Work(rows, logits, 0), 4, sums)
        assert (found.collectives, found.start_ms) == (collectives, collectives)
        assert found.received_bytes == found.send_ms == pytest.approx(2 * received[sums])


def test_estimate_has_a_row_for_each_kind_of_sums(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("step", Work(8, 8, 0), Hardware(), [1, 2, 8])
    assert [(row["devices"], row["sums"]) for row in rows] == [
        (1, None), (2, "whole"), (2, "parts"), (8, "whole"), (8, "parts"),
    ]  # fmt: skip
    assert all(1 < row["speedup"] < row["devices"] for row in rows[1:])
    monkeypatch.setattr("sys.argv", ["estimate", "--devices", "4", "--rows", "1", "--latency-us", "20"])
    tensor_parallel_estimate.main()
    printed = capsys.readouterr()
    assert "Nothing was run on a GPU" in printed.err
    assert [row["start_ms"] for row in json.loads(printed.out.splitlines()[-1])["rows"]] == [6.44, 3.24] * 2
