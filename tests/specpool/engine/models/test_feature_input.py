"""Folders of feature drafts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_drafts import HEAD_TOKENS, compacted, random_trained, save_feature_draft
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, refusal

from specpool.engine.config.architectures import FEATURES
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.draft_parts import FEATURE_INPUT, Features
from specpool.engine.models.loading import load_model
from specpool.engine.passes.features import FeatureEmbedding
from specpool.engine.weights.quantized import as_tensor, parts_of
from specpool.testing import VOCAB_SIZE


@pytest.mark.parametrize("options", [{}, {"native": False}, {"weights": "float32"}], ids=["kept", "torch", "float32"])
def test_a_folder_holds_all_trained_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = save_feature_draft(tmp_path)
    trained = compacted(random_trained(tmp_path / "target"), tmp_path)
    assert json.loads((folder / "config.json").read_text())[FEATURES] == {"layers": [1, 2], "width": 128}
    loaded = load_model(EngineOptions(model=str(folder), **options))
    assert loaded.features == Features((1, 2), 128)
    assert loaded.output_ids is not None
    assert tuple(loaded.output_ids.tolist()) == HEAD_TOKENS
    assert loaded.vocab_size == VOCAB_SIZE
    embedding = loaded.model.get_input_embeddings()
    assert isinstance(embedding, FeatureEmbedding)
    for name in ("fc", "project"):
        (weight,) = parts_of(getattr(embedding, name))
        assert torch.equal(as_tensor(weight), as_tensor(trained[name]))
    if loaded.outline is not None:
        expected, actual = loaded.outline.state_dict(), loaded.model.state_dict()
        assert actual.keys() <= expected.keys()


def test_states_as_wide_as_the_draft_need_no_projection(tmp_path: Path) -> None:
    folder = save_feature_draft(tmp_path, feature_layers=(3,), project=False, quantized=False)
    loaded = load_model(EngineOptions(model=str(folder)))
    assert loaded.features == Features((3,), 64)
    embedding = loaded.model.get_input_embeddings()
    assert isinstance(embedding, FeatureEmbedding)
    assert embedding.project is None


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ([], "no list of layers"),
        ({"layers": [], "width": 64}, "no list of layers"),
        ({"layers": [0], "width": 64}, "no list of layers from 1 to 1024"),
        ({"layers": [1, "2"], "width": 64}, "no list of layers"),
        ({"layers": [1, 2], "width": 63}, "no width for 2 layers: 63"),
        ({"layers": [1], "width": None}, "no width for 1 layers: None"),
        ({"layers": [1], "width": 192}, "has shape [64, 128] for project, not [64, 192]"),
    ],
)
def test_invalid_configurations_are_refused(tmp_path: Path, stated: object, reason: str) -> None:
    folder = edit_json(save_feature_draft(tmp_path), **{FEATURES: stated})
    assert reason in refusal(folder)


@pytest.mark.parametrize(
    ("name", "weight", "reason"),
    [
        ("fc", None, f"{FEATURE_INPUT} has no tensor for fc, not [64, 128]"),
        ("project", None, f"{FEATURE_INPUT} has no tensor for project, not [64, 128]"),
        ("fc", torch.zeros(64, 64), f"{FEATURE_INPUT} has shape [64, 64] for fc, not [64, 128]"),
        ("project", torch.zeros(128), f"{FEATURE_INPUT} has shape [128] for project, not [64, 128]"),
    ],
)
def test_mismatched_inputs_are_refused(tmp_path: Path, name: str, weight: torch.Tensor | None, reason: str) -> None:
    file = save_feature_draft(tmp_path, quantized=False) / FEATURE_INPUT
    stored = load_file(file)
    del stored[name]
    save_file(stored if weight is None else {**stored, name: weight}, file)
    assert reason in refusal(file.parent)


def test_damaged_or_missing_inputs_are_refused(tmp_path: Path) -> None:
    file = save_feature_draft(tmp_path) / FEATURE_INPUT
    file.write_bytes(b"\0" * 20)
    assert f"{FEATURE_INPUT} cannot be read" in refusal(file.parent)
    file.unlink()
    assert f"{FEATURE_INPUT} cannot be read" in refusal(file.parent)


def test_the_modules_of_transformers_cannot_run_it(tmp_path: Path) -> None:
    assert "the fused pass is switched off" in refusal(save_feature_draft(tmp_path), fused=False)
