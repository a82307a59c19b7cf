"""The quality of int8 activations: engines with known differences, and the whole command on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import save_random_gguf
from tiny_models import load_engine, random_tokens, save_model, small_config

from benchmarks import quality
from specpool.engine.run.engine import Engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_gguf(
        tmp_path_factory.mktemp("quality"), lambda name: "Q8_0", num_hidden_layers=1, max_position_embeddings=1024
    )


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return load_engine(model, exact=False, device="cpu", activations="float32", max_model_len=600)


class Changed:
    """An engine with scaled logits."""

    def __init__(self, engine: Engine, scale: float) -> None:
        self._engine, self._scale, self.head = engine, scale, engine.head

    def forward(self, spans: Any) -> torch.Tensor:
        return self._scale * self._engine.forward(spans)


def test_an_engine_does_not_differ_from_itself(engine: Engine) -> None:
    found = quality.compare(engine, engine, random_tokens(30))
    assert found.divergence.tolist() == [0.0] * 29
    assert found.is_same.all()
    assert torch.equal(found.likelihoods[0], found.likelihoods[1])


def test_differences_match_their_definitions(engine: Engine) -> None:
    """The text takes several passes."""
    tokens = random_tokens(2 * quality.ROWS + 5)
    other: Any = Changed(engine, 0.5)
    found = quality.compare(engine, other, tokens)
    logits = quality.compare(engine, engine, tokens)
    (spans, _), *_ = quality.steps([*tokens[:7], 0])
    p = engine.forward(spans)[-1].double().softmax(-1)
    q = (0.5 * engine.forward(spans)[-1]).double().softmax(-1)
    assert found.divergence[6].item() == pytest.approx((p * (p / q).log()).sum().item())
    assert found.likelihoods[:, 6].tolist() == pytest.approx([p[tokens[7]].log().item(), q[tokens[7]].log().item()])
    assert len(found.divergence) == len(tokens) - 1
    assert (found.divergence > 0).all()
    assert found.is_same.all()
    assert torch.equal(found.likelihoods[0], logits.likelihoods[0])


def test_an_answer_ends_with_the_end_token(engine: Engine) -> None:
    tokens = quality.answer(engine, random_tokens(9), 12)
    assert 1 <= len(tokens) <= 12
    ends = [token in engine.loaded.tokenizer.eos_token_ids for token in tokens]
    assert not any(ends[:-1])
    assert len(tokens) == 12 or ends[-1]


def test_a_model_without_quantized_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path, small_config("llama"))
    monkeypatch.setattr("sys.argv", ["quality", "--model", str(folder), "--threads", "1"])
    with pytest.raises(SystemExit, match="2"):
        quality.main()
    refusal = capsys.readouterr().err.splitlines()[-1]
    assert "--model: int8 activations, which this benchmark compares, need a trained draft, or a GGUF file" in refusal
    assert "set activations" not in refusal


def test_the_command_prints_a_table_and_json(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = ({"id": text, "prompt": text} for text in ("Once upon a time", "Name a fruit."))
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    flags = ["--model", str(model), "--prompts", str(prompts), "--num-prompts", "2", "--tokens", "3"]
    monkeypatch.setattr("sys.argv", ["quality", *flags, "--threads", "1", "--output", str(tmp_path)])
    quality.main()
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert result == json.loads((tmp_path / "quality.json").read_text())
    assert "int8 activations, compared with float32" in captured.err
    read, answers, both = result["rows"]
    assert [row["text"] for row in result["rows"]] == ["prompts", "answers", "both"]
    assert 2 <= answers["positions"] <= 6
    assert both["positions"] == read["positions"] + answers["positions"]
    assert 0 <= both["kl"] <= both["largest_kl"] < 0.1
    assert 0.8 < both["same_most_probable"] <= 1
    assert both["log_likelihood_int8"] == pytest.approx(both["log_likelihood_float32"], abs=0.1)
    assert result["goal_is_met"] == (both["kl"] <= result["goal_kl"])
    assert set(result["weight_kinds"]) == {"Q8_0"}
