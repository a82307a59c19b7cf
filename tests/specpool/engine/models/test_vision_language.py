"""The text parts of vision-language checkpoints are served with the logits of the whole model."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_service import serving_pair
from safetensors import safe_open
from tiny_models import decode_alone, edit_json, edited_weights, load_engine, random_tokens, refusal, rows_that_differ
from vision_language import TEXT, save_vision_language, use_new_names

from specpool.client import GenerateOptions
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.config import load_config
from specpool.engine.models.loading import load_model
from specpool.engine.models.preflight import InvalidOptionError, check_options
from specpool.engine.models.vision_language import TEXT_NOTE, is_text_weight
from specpool.engine.models.weights import read_weight, read_weights
from specpool.testing import EOS_TOKEN_ID
from specpool.v1 import generation_pb2 as pb
from specpool.v1.common_pb2 import EQUIVALENCE_BITWISE

TOKENS = random_tokens(60)
PLAIN = {"mistral3": "mistral", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
PLAIN |= {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def options(folder: Path, **changes: Any) -> EngineOptions:
    return EngineOptions(model=str(folder), max_model_len=256, **changes)


@torch.inference_mode()
def text_logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", TEXT)
def test_text_part_has_the_bits_of_the_whole_model(
    kind: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = text_logits(save_vision_language(tmp_path, kind, tie_word_embeddings=tied))
    config = load_config(options(tmp_path))
    assert config.model_type == PLAIN[kind]
    for rename in (lambda folder: None, use_new_names):
        rename(tmp_path)
        arguments = torch.device("cpu"), torch.float32
        with caplog.at_level(logging.WARNING):
            model, report = read_weights(str(tmp_path), config, *arguments, attn_implementation="eager")
        assert torch.equal(text_logits(model), expected)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert not caplog.records
        head = read_weight(options(tmp_path), model.config, "lm_head.weight")
        assert torch.equal(head, model.lm_head.weight)
    assert model.config.tie_word_embeddings is tied
    assert not any(name.startswith("model.vi") for name, _ in model.named_modules())


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3", "qwen3_5_moe")]


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", *SLOW])
def test_engine_serves_the_text_part(kind: str, tmp_path: Path) -> None:
    expected = text_logits(save_vision_language(tmp_path, kind))
    engine = load_engine(tmp_path, max_model_len=256)
    assert engine.bitwise
    assert type(engine.forward_pass).__name__ == "NativeModel"
    assert engine.notes[0] == TEXT_NOTE
    assert (decode_alone(engine, TOKENS) - expected).abs().max() < 1e-4
    assert rows_that_differ(engine) == 0
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    assert engine.facts.parameters == sum(size for name, size in stored.items() if is_text_weight(name))
    assert engine.facts.parameters < sum(stored.values())


def test_experts_may_be_stored_in_one_weight(tmp_path: Path) -> None:
    """As in the checkpoints of Qwen3.5."""
    expected = text_logits(save_vision_language(tmp_path, "qwen3_5_moe"))
    with edited_weights(tmp_path) as weights:
        for layer in {name.partition(".0.gate_proj")[0] for name in weights if ".experts.0.gate_proj" in name}:
            ups, downs = [], []
            for index in range(sum(name.startswith(layer) and "down_proj" in name for name in weights)):
                gate, up, down = (weights.pop(f"{layer}.{index}.{each}_proj.weight") for each in ("gate", "up", "down"))
                ups.append(torch.cat([gate, up]))
                downs.append(down)
            weights |= {f"{layer}.gate_up_proj": torch.stack(ups), f"{layer}.down_proj": torch.stack(downs)}
    engine = load_engine(tmp_path, max_model_len=256)
    assert (decode_alone(engine, TOKENS) - expected).abs().max() < 1e-4


@pytest.mark.slow
def test_shards_have_the_weights_of_one_device(tmp_path: Path) -> None:
    save_vision_language(tmp_path, "qwen3_vl", tie_word_embeddings=True)
    alone, sharded = load_engine(tmp_path), load_engine(tmp_path, device="cpu", tensor_parallel=2)
    try:
        assert sharded.notes[0] == TEXT_NOTE
        assert sharded.weights_fingerprint == alone.weights_fingerprint
        assert sharded.numerics_fingerprint == alone.numerics_fingerprint
    finally:
        sharded.close()


def test_older_configurations_state_the_text_part_beside_the_vision_part(tmp_path: Path) -> None:
    """Old configurations, such as Qwen2.5-VL-7B-Instruct's, give the multimodal rotary embedding its own type."""
    expected = text_logits(save_vision_language(tmp_path, "qwen2_5_vl", eos_token_id=[3, EOS_TOKEN_ID]))
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    del text["model_type"], text["dtype"], config["dtype"]
    sections = text.pop("rope_parameters")["mrope_section"]
    scaling = {"type": "mrope", "mrope_section": sections}
    old = {**text, **config, "rope_theta": 10_000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**old, "eos_token_id": [3, EOS_TOKEN_ID]}))
    check_options(options(tmp_path))
    config = load_config(options(tmp_path))
    assert config.dtype == torch.bfloat16
    model, _ = read_weights(str(tmp_path), config, torch.device("cpu"), torch.float32, attn_implementation="eager")
    assert torch.equal(text_logits(model), expected)
    assert load_model(options(tmp_path)).tokenizer.eos_token_ids == (3, EOS_TOKEN_ID)


def test_the_files_decide_whether_the_head_is_tied(tmp_path: Path) -> None:
    save_vision_language(tmp_path, "mistral3")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not load_model(options(tmp_path)).config.tie_word_embeddings
    with edited_weights(tmp_path) as weights:
        del weights["language_model.lm_head.weight"]
    assert load_model(options(tmp_path)).config.tie_word_embeddings


def test_unusable_text_parts_are_refused(tmp_path: Path) -> None:
    save_vision_language(tmp_path, "qwen3_vl")
    with pytest.raises(InvalidOptionError, match="max-model-len: 9999 exceeds"):
        check_options(EngineOptions(model=str(tmp_path), max_model_len=9999))
    with pytest.raises(InvalidOptionError, match=r"kv-memory: 1\.0KiB is too small"):
        check_options(EngineOptions(model=str(tmp_path), kv_memory=1024))
    with edited_weights(tmp_path) as weights:
        del weights["model.language_model.norm.weight"]
    assert "lack 1 of the model's weights: model.norm.weight" in refusal(tmp_path)
    edit_json(tmp_path, text_config={"hidden_size": "x"})
    assert "hidden_size is 'x'" in refusal(tmp_path)
    edit_json(tmp_path, text_config=None)
    assert "text_config of this qwen3_vl model is None, not an object" in refusal(tmp_path)
    edit_json(tmp_path, text_config={"model_type": ["qwen3"]})
    assert "text_config.model_type of this qwen3_vl model is ['qwen3']" in refusal(tmp_path)
    edit_json(tmp_path, model_type="mistral3", text_config={"model_type": "unheard"})
    assert "this mistral3 model is not supported, because it has a text part of type unheard" in refusal(tmp_path)


def test_templates_of_image_processors_are_read(tmp_path: Path) -> None:
    save_vision_language(tmp_path, "gemma3")
    (tmp_path / "chat_template.jinja").unlink()
    template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_model(options(tmp_path)).tokenizer.chat_template == template


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl", "qwen3_vl", "gemma3"])
async def test_speculation_through_workers_equals_plain_decoding(kind: str, tmp_path: Path) -> None:
    for name, noise in (("target", 0.0), ("draft", 0.005)):
        save_vision_language(tmp_path / name, kind, noise, eos_token_id=EOS_TOKEN_ID)
    chat, sampling = [{"role": "user", "content": "hello"}], GenerateOptions(max_tokens=24, ignore_eos=True)
    worker = {"max_model_len": 256}
    async with serving_pair(tmp_path / "target", tmp_path / "draft", worker=worker, overlap="on") as service:
        info = (await service.client.stub.GetModelInfo(pb.GetModelInfoRequest())).target
        assert info.equivalence == EQUIVALENCE_BITWISE
        assert info.notes[0] == TEXT_NOTE
        plain = await service.client.generate(chat, num_speculative_tokens=0, **sampling)
        drafted = await service.client.generate(chat, num_speculative_tokens=4, cache_salt="other", **sampling)
    assert list(drafted.token_ids) == list(plain.token_ids)
    assert drafted.speculative_decoding.num_accepted_draft_tokens > 0
