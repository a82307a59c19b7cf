"""The estimate of a model divided among GPUs, against the same sums by hand."""

import json

import pytest

from benchmarks import tensor_parallel_estimate
from benchmarks.tensor_parallel_estimate import Estimate, Hardware, Shapes, Work, rows_of
from specpool.engine.sharding.shares import Sums

# 10 layers of 200 weights; rates of one byte or operation per millisecond.
SHAPES = Shapes(layers=10, hidden=5, intermediate=8, heads=2, kv_heads=2, head_dim=2, vocabulary=100)
HARDWARE = Hardware(memory_tb_s=1e-9, peak_tflops=1e-9, link_gb_s=2e-6, link_fraction=0.5, latency_us=1000)


def estimate(work: Work, devices: int, sums: Sums = "whole") -> Estimate:
    return Estimate(SHAPES, HARDWARE, work, devices, sums)


def test_a_70b_model_has_its_weights() -> None:
    whole = Estimate(Shapes(), Hardware(), Work(1, 1, 0), 1, "whole")
    assert whole.weight_bytes == pytest.approx(2 * 70.55e9, rel=1e-3)
    assert Shapes().cached_values == 163_840
    assert whole.total_ms == pytest.approx(1e3 * (whole.weight_bytes - 2 * 128_256 * 8192) / 3.35e12)


def test_one_device_exchanges_nothing() -> None:
    its = estimate(Work(3, 1, 7), 1)
    assert (its.collectives, its.start_ms, its.send_ms) == (0, 0, 0)
    assert its.total_ms == its.device_ms


def test_a_small_pass_reads_and_a_large_one_computes() -> None:
    layers, head, cached = 10 * 200, 100 * 5, 2 * 10 * 4
    assert estimate(Work(1, 1, 6), 1).device_ms == pytest.approx(2 * (layers + head + 6 * cached))
    assert estimate(Work(9, 2, 0), 2).device_ms == pytest.approx(2 * (layers * 9 + head * 2) / 2)


@pytest.mark.parametrize(("sums", "collectives"), [("whole", 42), ("parts", 22)])
def test_every_collective_starts_once(sums: Sums, collectives: int) -> None:
    its = estimate(Work(1, 1, 0), 4, sums)
    assert (its.collectives, its.start_ms) == (collectives, collectives)


def test_features_come_from_all_others_and_terms_from_each() -> None:
    rows, logits = 3, 2
    embedding, head = rows * 5 * 3, logits * 100 * 3 / 4
    gathered = rows * 10 * (4 + 5 + 8 + 5) * 3 / 4
    terms = rows * 10 * 2 * 5 * 3
    work = Work(rows, logits, 0)
    assert estimate(work, 4, "whole").received_bytes == pytest.approx(2 * (gathered + embedding + head))
    assert estimate(work, 4, "parts").received_bytes == pytest.approx(2 * (terms + embedding + head))
    assert estimate(work, 4, "parts").send_ms == pytest.approx(2 * (terms + embedding + head))


def test_a_row_for_each_way_to_divide() -> None:
    rows = rows_of("step", Work(8, 8, 0), Hardware(), [1, 2, 8])
    assert [(row["devices"], row["sums"]) for row in rows] == [
        (1, None), (2, "whole"), (2, "parts"), (8, "whole"), (8, "parts"),
    ]  # fmt: skip
    assert rows[0]["speedup"] == 1
    assert all(1 < row["speedup"] < row["devices"] for row in rows[1:])


def test_the_command_says_that_nothing_was_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["estimate", "--devices", "4", "--rows", "1", "--latency-us", "20"])
    tensor_parallel_estimate.main()
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert "Nothing was run on a GPU" in printed.err
    assert result["hardware"]["latency_us"] == 20
    assert [row["start_ms"] for row in result["rows"]] == [6.44, 3.24] * 2


@pytest.mark.parametrize(
    "arguments", [["--devices", "3"], ["--rows", "0"], ["--memory-tb-s", "0"], ["--link-fraction", "nan"]], ids="=".join
)
def test_what_cannot_be_is_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["estimate", *arguments])
    with pytest.raises(SystemExit):
        tensor_parallel_estimate.main()
    assert f"argument {arguments[0]}: " in capsys.readouterr().err.splitlines()[-1]
