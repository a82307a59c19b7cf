"""Stored weights with a configuration that does not match are refused in one line that names the difference."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import edited_gguf, random_rows, save_random_gguf
from safetensors.torch import load_file, save_file
from test_embedded_pair import random_trained
from tiny_models import edit_json, edited_weights, refusal, save_model, small_config
from transformers import AutoModelForCausalLM

from specpool.engine.config.options import EngineOptions
from specpool.engine.models import loading
from specpool.engine.models.draft_folder import save_draft
from specpool.engine.models.draft_parts import OUTPUT_HEAD
from specpool.engine.models.draft_weights import load_compact, save_compact
from specpool.engine.models.loading import load_model
from specpool.engine.weights.quantized import QuantizedEmbedding, QuantizedLinear


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_gguf(tmp_path_factory.mktemp("untied"), lambda name: "Q8_0")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_gguf(tmp_path_factory.mktemp("tied"), lambda name: "Q8_0", tie_word_embeddings=True)


def load(model: Path) -> loading.LoadedModel:
    return load_model(EngineOptions(model=str(model), device="cpu"))


def with_config(file: Path, folder: Path, **changes: Any) -> Path:
    """Create a folder with the file and a changed configuration."""
    shutil.copytree(file.parent / "saved", folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    shutil.copy(file, folder / "model.gguf")
    return edit_json(folder, **changes)


@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [
        ("num_hidden_layers", 1, "num_hidden_layers is 1, but the file's block_count is 2"),
        ("num_attention_heads", 2, "num_attention_heads is 2, but the file's attention.head_count is 4"),
        ("num_key_value_heads", 1, "num_key_value_heads is 1, but the file's attention.head_count_kv is 2"),
        ("rms_norm_eps", 0.5, "rms_norm_eps is 0.5, but the file's attention.layer_norm_rms_epsilon is 9.99999997"),
        (
            "rope_parameters",
            {"rope_theta": 5000.0, "rope_type": "default"},
            "rope_theta is 5000.0, but the file's rope.freq_base is 10000.0",
        ),
    ],
)
def test_different_sizes_are_refused(tmp_path: Path, untied: Path, name: str, number: Any, reason: str) -> None:
    message = refusal(with_config(untied, tmp_path, **{name: number}))
    assert f"the configuration does not match model.gguf: {reason}" in message


def test_unused_weights_are_refused(tmp_path: Path, untied: Path) -> None:
    more = {f"{name}.weight": np.ones(4, np.float32) for name in ("d", "c", "b", "a")}
    message = refusal(edited_gguf(untied, tmp_path / "more.gguf", {}, more))
    assert message.endswith("4 weights that the configured model does not use: a.weight, b.weight, c.weight, ...")


def test_a_head_that_differs_from_tied_embeddings_is_refused(tmp_path: Path, tied: Path) -> None:
    embeddings = next(tensor.data for tensor in gguf.GGUFReader(tied).tensors if tensor.name == "token_embd.weight")
    (tmp_path / "saved").symlink_to(tied.parent / "saved")
    same = edited_gguf(tied, tmp_path / "same.gguf", {}, {"output.weight": embeddings})
    assert load(with_config(same, tmp_path / "first")).vocab_size == 258
    head = random_rows("Q8_0", 258, 64, seed=9)
    other = edited_gguf(tied, tmp_path / "other.gguf", {}, {"output.weight": head})
    message = refusal(with_config(other, tmp_path / "second"))
    assert "the output head in the file differs from the embeddings" in message
    assert "tie_word_embeddings" in message


def test_rotary_scaling_must_be_configured(tmp_path: Path, untied: Path) -> None:
    (tmp_path / "saved").symlink_to(untied.parent / "saved")
    scaled = edited_gguf(untied, tmp_path / "scaled.gguf", {"llama.rope.scaling.factor": 2.0})
    reason = "it has no scaling in rope_parameters, but the file scales positions (type linear)"
    assert refusal(with_config(scaled, tmp_path / "folder")).endswith(reason)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert load(with_config(scaled, tmp_path / "folder", rope_parameters=rope))


def test_a_configuration_may_scale_positions_when_the_file_alone_is_refused(tmp_path: Path, untied: Path) -> None:
    (tmp_path / "saved").symlink_to(untied.parent / "saved")
    freqs = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    scaled = edited_gguf(untied, tmp_path / "scaled.gguf", {}, freqs)
    assert refusal(scaled).endswith("serve the folder with the model's own config.json instead")
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert load(with_config(scaled, tmp_path / "folder", rope_parameters=rope))


# --- Drafts


def draft_of(architecture: str, folder: Path) -> Path:
    target = save_model(folder / "target", small_config(architecture, vocab_size=258, num_hidden_layers=3))
    save_compact(folder / "trained", random_trained(target, 70))
    save_draft(folder / "draft", str(target), load_compact(folder / "trained"))
    return folder / "draft"


def test_drafts_of_other_architectures_are_dequantized(tmp_path: Path) -> None:
    loaded = load(draft_of("olmo2", tmp_path))
    assert not any(isinstance(module, QuantizedLinear | QuantizedEmbedding) for module in loaded.model.modules())
    by_library: Any = AutoModelForCausalLM.from_config(loaded.config).model.eval()
    ours: Any = loaded.model.model
    by_library.load_state_dict(ours.state_dict())
    ours.config._attn_implementation = by_library.config._attn_implementation = "eager"
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(ours(ids).last_hidden_state, by_library(ids).last_hidden_state)


def test_all_tensors_of_a_draft_move_to_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = draft_of("llama", tmp_path)
    monkeypatch.setattr(loading, "use_device", torch.device)
    loaded = load_model(EngineOptions(model=str(draft), device="meta"))
    assert loaded.output_ids is not None
    assert {loaded.output_ids.device, *(weight.device for weight in loaded.model.parameters())} == {
        torch.device("meta")
    }


def test_invalid_heads_and_unused_weights_of_a_draft_are_refused(tmp_path: Path) -> None:
    draft = draft_of("llama", tmp_path)
    head = load_file(draft / OUTPUT_HEAD)
    for ids in (head["output_ids"][:0], head["output_ids"][None], head["output_ids"][0]):
        save_file({**head, "output_ids": ids.clone()}, draft / OUTPUT_HEAD)
        assert "has a head of (70, 64) for " in refusal(draft)
    save_file({**head, "weight.INT8": head["weight.INT8"].flatten()}, draft / OUTPUT_HEAD)
    assert refusal(draft).endswith("tensor weight.INT8 is uint8 [4760], not rows of bytes")
    with edited_weights(draft) as weights:
        weights["model.more.INT8"] = head["weight.INT8"]
    assert refusal(draft).endswith("1 weights that the configured model does not use: model.more.INT8")
