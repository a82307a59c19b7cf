"""A pair of random models whose draft is right with a chosen probability."""

from pathlib import Path

import pytest
import torch
from tiny_models import load_engine
from transformers import AutoTokenizer

from benchmarks import pair, shapes
from specpool.engine.cache.spans import Span
from specpool.testing import EOS_TOKEN_ID

VOCAB_SIZE = 2000
SHAPE = {**shapes.SHAPES["qwen3-0.6b"], "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "intermediate_size": 96,
         "num_key_value_heads": 2, "head_dim": 16, "num_attention_heads": 4}  # fmt: skip
PROMPT = list(b"Once upon a time")
TEXTS = ("Why?", "Why me?", "Tell me why.")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "large", {**SHAPE, "hidden_size": 256})
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
