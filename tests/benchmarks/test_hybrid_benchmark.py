"""The benchmark of hybrid models runs to its end on a tiny shape, and its last line is JSON."""

import json

import pytest

from benchmarks import hybrid, shapes

TINY = {
    **shapes.HYBRID_SHAPES["qwen3.5-0.8b"], "vocab_size": 257, "num_hidden_layers": 4, "hidden_size": 64,
    "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
FLAGS = ["--shape", "tiny", "--threads", "1", "--cached", "20", "--repeats", "1", "--steps", "1"]


def test_shape_is_measured_to_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(shapes.HYBRID_SHAPES, "tiny", TINY)
    monkeypatch.setattr("sys.argv", ["hybrid", *FLAGS])
    hybrid.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["shape"], result["layers"], result["bitwise"]) == ("tiny", 4, True)
    assert [row["sequences"] for row in result["steps"]] == [1, 8]
    assert all(row["largest_difference"] < 1e-3 for row in result["steps"])
    assert result["state_mib"]["ratio"] > 0
