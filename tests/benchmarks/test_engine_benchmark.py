"""The benchmark of the engine: on a tiny shape it measures to its end, and its last line is JSON."""

import json

import pytest

from benchmarks import engine, shapes

SHAPE = {
    **shapes.SHAPES["qwen3-0.6b"], "vocab_size": 257, "num_hidden_layers": 2, "hidden_size": 64,
    "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "num_attention_heads": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(engine, "BATCHES", (1, 2))
    monkeypatch.setattr(engine, "PROFILED", ((1, 32),))
    monkeypatch.setattr(engine, "READ_BYTES", 2**20)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["engine", "--lengths", "32", "--repeats", "1", "--steps", "1", *arguments])
    engine.main()


@pytest.mark.parametrize(("dtype", "flags"), [("float32", []), ("bfloat16", ["--no-peer"])])
def test_a_shape_is_measured_to_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, flags: list[str]
) -> None:
    run(monkeypatch, "--shape", "tiny", "--device", "cpu", "--dtype", dtype, "--threads", "1", *flags)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["model"], result["dtype"], result["device"]) == ("tiny", dtype, "cpu")
    assert result["notes"] == []
    assert [row["sequences"] for row in result["steps"]] == [1, 2]
    assert all((row["transformers_ms"] is None) == bool(flags) for row in result["steps"])
    assert [part["cached"] for part in result["parts"]] == [32]


def test_a_device_that_is_not_there_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--shape", "tiny", "--device", "foo")
    assert "--device: device foo cannot be used: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("flag", "value"), [("--dtype", "int8"), ("--shape", "huge")])
def test_bad_options_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, flag, value)
    assert flag in capsys.readouterr().err.splitlines()[-1]
