"""A pair of random models whose draft is right with a chosen probability, and whose tokens reveal rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import load_engine
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks import pair, shapes
from benchmarks.answers import Answer, exact_match
from specpool.client.prompts import PromptLine
from specpool.engine.cache.spans import Span
from specpool.testing import EOS_TOKEN_ID
from specpool.v1 import generation_pb2 as pb

VOCAB_SIZE = 2000
SHAPE = {**shapes.SHAPES["qwen3-0.6b"], "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "intermediate_size": 96,
         "num_key_value_heads": 2, "head_dim": 16, "num_attention_heads": 4}  # fmt: skip
PROMPT = list(b"Once upon a time")
TEXTS = ("Why?", "Why me?", "Tell me why.")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "large", {**SHAPE, "hidden_size": 256})
    monkeypatch.setitem(shapes.SHAPES, "deep", {**SHAPE, "hidden_size": 256, "num_hidden_layers": 12})
    monkeypatch.setitem(shapes.SHAPES, "little", {**SHAPE, "hidden_size": 192})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "acceptance", [0.7, pytest.param(0.0, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_draft_is_right_with_the_chosen_probability(
    tmp_path: Path, acceptance: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", "large", "--draft", "little", "--acceptance", str(acceptance), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["pair", "--output", str(tmp_path), *arguments])
    pair.main()
    assert capsys.readouterr().out.split() == [str(tmp_path / "target"), str(tmp_path / "draft")]
    target, draft = load_engine(tmp_path / "target"), load_engine(tmp_path / "draft", exact=False)
    assert target.bitwise
    tokens = list(PROMPT)
    for start in [0, *range(len(PROMPT), len(PROMPT) + 399)]:
        tokens.append(int(target.forward([Span(0, start, tokens[start:], 1)]).argmax()))
    written = tokens[len(PROMPT) :]
    assert len(set(written)) == 400  # prompt lookup finds nothing
    assert EOS_TOKEN_ID not in written
    assert max(written) > VOCAB_SIZE / 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}])["input_ids"] for text in TEXTS]
    firsts = [int(target.forward([Span(1, 0, prompt, 1)]).argmax()) for prompt in prompts]
    assert len(set(firsts)) == len(TEXTS)  # answers start differently
    choices = draft.forward([Span(0, 0, tokens[:-1], len(written))]).argmax(-1)
    right = (choices == torch.tensor(written)).float().mean().item()
    assert right == pytest.approx(acceptance, abs=0.08 if 0 < acceptance < 1 else 0)


@pytest.mark.usefixtures("small")
def test_pair_needs_one_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pair", "--output", str(tmp_path), "--draft", "little"])
    with pytest.raises(SystemExit):
        pair.main()
    assert "--draft: the vocabulary has 2000 tokens" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.rglob("*.safetensors"))


class HalvesInTurn(torch.nn.Linear):
    """A linear layer that adds the products of the first half of its inputs, then those of the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = zip(x.float().chunk(2, -1), self.weight.float().chunk(2, -1), strict=True)
        return sum(linear(half, weight) for half, weight in halves).to(x)  # type: ignore[union-attr]


@torch.inference_mode()
def greedy_answers(model: Any, count: int, max_tokens: int) -> list[Answer]:
    """Answers that start with different tokens."""
    tokens, cache = torch.arange(65, 65 + count)[:, None], DynamicCache(config=model.config)
    while tokens.shape[1] <= max_tokens:
        logits = model(tokens[:, -1:], past_key_values=cache).logits
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return [Answer(pb.GenerateResponse(token_ids=row[1:]), 0.0, []) for row in tokens.tolist()]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_another_order_of_summation_is_no_exact_match(tmp_path: Path) -> None:
    torch.manual_seed(0)
    successors, _ = pair.successors_of_pair(VOCAB_SIZE, 0.7)
    pair.save_model(tmp_path, "deep", successors, torch.device("cpu"), torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    lines, truth = [PromptLine(str(index), str(index)) for index in range(24)], dict[str, list[int]]()
    for _ in range(2):
        assert exact_match(lines, greedy_answers(model, len(lines), 64), truth) == 1
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = HalvesInTurn
    assert exact_match(lines, greedy_answers(model, len(lines), 64), truth) < 1
