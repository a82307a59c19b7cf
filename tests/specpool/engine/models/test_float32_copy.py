"""The copy of the embedded target for programs that read no GGUF files: its weights are those of the file."""

from pathlib import Path
from typing import Any

import pytest
from gguf_files import save_random_gguf
from safetensors.torch import load_file
from tiny_models import load_engine
from transformers import AutoTokenizer

from specpool.engine.models import embedded_pair
from specpool.engine.models.embedded_pair import Pair, float32_copy
from specpool.engine.passes.native.model import NativeModel


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    (tmp_path / "pair").mkdir()
    target = save_random_gguf(tmp_path / "pair", lambda name: "Q4_1")
    pair = Pair(target, target)
    monkeypatch.setattr(embedded_pair, "embedded_pair", lambda cache: pair)
    return pair


def test_a_float32_copy_has_the_logits_of_the_gguf_file(pair: Pair) -> None:
    kept, copied = load_engine(pair.target), load_engine(float32_copy())
    assert isinstance(kept.forward_pass, NativeModel)
    assert isinstance(copied.forward_pass, NativeModel)
    assert "Q4_1" in kept.forward_pass.kinds
    assert copied.forward_pass.kinds.keys() <= {"FLOAT32", "BFLOAT16"}
    assert kept.bitwise
    assert copied.weights_fingerprint == kept.weights_fingerprint
    assert copied.numerics_fingerprint == kept.numerics_fingerprint != ""


def test_a_float32_copy_is_a_folder_that_is_made_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made = float32_copy()
    assert {str(weight.dtype) for weight in load_file(made / "model.safetensors").values()} == {"torch.float32"}
    assert AutoTokenizer.from_pretrained(made).is_fast
    assert (made / "generation_config.json").is_file()
    monkeypatch.delattr(embedded_pair, "save_float32")
    assert float32_copy() == made


@pytest.mark.parametrize("flags", [{"weights": "float32"}, {"native": False}, {"fused": False}])
def test_weights_that_are_not_kept_are_unpacked_at_start(pair: Pair, flags: dict[str, Any]) -> None:
    unpacked = load_engine(pair.target, **flags)
    assert "its GGUF weights are unpacked to float32: 4 bytes each" in unpacked.notes
    assert unpacked.info().weight_bytes >= 4 * unpacked.info().parameters
    assert unpacked.weights_fingerprint == load_engine(pair.target).weights_fingerprint


def test_an_interrupted_copy_leaves_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(model: str, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    before = sorted(pair.target.parent.iterdir())
    monkeypatch.setattr(embedded_pair, "save_float32", interrupt)
    with pytest.raises(KeyboardInterrupt):
        float32_copy()
    assert sorted(pair.target.parent.iterdir()) == before
