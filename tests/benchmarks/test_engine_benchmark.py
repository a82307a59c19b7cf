"""The engine benchmark runs to its end on a tiny shape, and its last line is JSON."""

import json

import pytest

from benchmarks import engine, shapes

SHAPE = {
    **shapes.SHAPES["qwen3-0.6b"], "vocab_size": 257, "num_hidden_layers": 2, "hidden_size": 64,
    "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "num_attention_heads": 4,
}  # fmt: skip
FLAGS = ["--shape", "tiny", "--device", "cpu", "--threads", "1", "--lengths", "32", "--repeats", "1", "--steps", "1"]


@pytest.mark.parametrize(
    ("dtype", "flags"), [("float32", []), pytest.param("bfloat16", ["--no-peer"], marks=pytest.mark.slow)]
)
def test_shape_is_measured_to_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, flags: list[str]
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(engine, "BATCHES", (1, 2))
    monkeypatch.setattr(engine, "PROFILED", ((1, 32),))
    monkeypatch.setattr(engine, "READ_BYTES", 2**20)
    monkeypatch.setattr("sys.argv", ["engine", *FLAGS, "--dtype", dtype, *flags])
    engine.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["model"], result["dtype"], result["device"]) == ("tiny", dtype, "cpu")
    assert result["notes"] == []
    assert [row["sequences"] for row in result["steps"]] == [1, 2]
    assert all((row["transformers_ms"] is None) == bool(flags) for row in result["steps"])
    assert [part["cached"] for part in result["parts"]] == [32]
