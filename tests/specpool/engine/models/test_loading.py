"""Loaded models have the logits of transformers; incomplete, unsafe and foreign ones are refused."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import save_gguf
from safetensors.torch import load_file
from tiny_models import (
    decode_alone,
    edit_json,
    edited_weights,
    load_engine,
    random_tokens,
    refusal,
    save_model,
    transformers_logits,
)
from tiny_pair import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.pair import save_tokenizer
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import load_model
from specpool.engine.passes import attention


def test_a_pad_token_with_a_zero_embedding_is_harmless(tmp_path: Path) -> None:
    """Its keys are zero, which must not look like unsupported attention."""
    folder = save_model(tmp_path, tiny_config(pad_token_id=0))
    with edited_weights(folder) as weights:
        weights["model.embed_tokens.weight"][0] = 0
    assert load_engine(folder).bitwise


@pytest.mark.parametrize(("tied", "qtype"), [(True, None), (False, "Q8_0")])
def test_gguf_file_matches_transformers_logits(tmp_path: Path, tied: bool, qtype: str | None) -> None:
    folder = save_model(tmp_path / "folder", tiny_config(vocab_size=258, tie_word_embeddings=tied))
    file = save_gguf(folder, tmp_path / "model.gguf", lambda name: qtype)
    if qtype is not None:
        ggml_type = gguf.GGMLQuantizationType[qtype]
        with edited_weights(folder) as weights:  # rows are rounded independently of their order
            for name in [name for name, weight in weights.items() if weight.dim() == 2]:
                blocks = gguf.quantize(weights[name].numpy(), ggml_type)
                weights[name] = torch.from_numpy(gguf.dequantize(blocks, ggml_type))
    engine, tokens = load_engine(file, activations="float32"), random_tokens(30)
    torch.testing.assert_close(decode_alone(engine, tokens), transformers_logits(folder, tokens), atol=1e-4, rtol=1e-4)
    assert engine.bitwise
    assert (engine.info().architecture, engine.info().dtype) == ("llama", "float32")
    assert engine.loaded.tokenizer.eos_token_ids == (257,)


# --- Other logits


def test_logits_that_differ_from_transformers_are_refused(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda q, *rest, **more: real(4 * q, *rest, **more))
    assert "logits" in refusal(tiny_pair[0], native=False)


# --- Files that could run code


def test_a_pickled_checkpoint_is_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_pair[0], tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert refusal(folder).endswith("only safetensors and GGUF files are read, because others can run code")


def with_code(folder: Path, file: str, **changes: Any) -> Path:
    """Reference a model's own code in one of its files; the code leaves a trace when it runs."""
    (folder / "own.py").write_text(f"open({str(folder / 'trace')!r}, 'w')\n")
    return edit_json(folder, file, **changes)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}),
    ],
)
def test_a_model_that_needs_its_own_code_is_refused(
    tiny_pair: tuple[Path, Path], tmp_path: Path, file: str, changes: dict[str, Any]
) -> None:
    folder = with_code(shutil.copytree(tiny_pair[0], tmp_path / "model"), file, **changes)
    assert refusal(folder).endswith(
        "it needs its own code, which is never run; docs/models.md lists the supported models"
    )
    assert not (folder / "trace").exists()


def test_optional_code_of_a_model_is_ignored(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    folder = with_code(shutil.copytree(tiny_pair[0], tmp_path / "model"), "config.json", auto_map=auto_map)
    assert load_model(EngineOptions(model=str(folder))).config.model_type == "llama"
    assert not (folder / "trace").exists()


def test_all_files_are_read_at_the_same_revision(tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    for library_class in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        load = library_class.from_pretrained

        def from_hub(*own: Any, load: Any = load, **source: Any) -> Any:
            if own:  # transformers' own call, once it has a folder
                return load(*own, **source)
            assert source["trust_remote_code"] is False
            requests.append((source.pop("pretrained_model_name_or_path"), source.pop("revision")))
            return load(tiny_pair[0], **source)

        monkeypatch.setattr(library_class, "from_pretrained", from_hub)

    def record(model: str, revision: str, **_: object) -> Path:
        requests.append((model, revision))
        return tiny_pair[0] / "config.json"

    monkeypatch.setattr("specpool.engine.config.hub.hub_config", record)
    monkeypatch.setattr("specpool.engine.models.weights.snapshot_download", record)
    load_model(EngineOptions(model="some/model", revision="0123abc"))
    assert requests == [("some/model", "0123abc")] * 5


# --- Incomplete checkpoints


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"num_hidden_layers": 5}, ["lack 18 of the model's weights", "model.layers.3.input_layernorm.weight"]),
        (
            {"intermediate_size": 32},
            ["lack 9 of the model's weights", "model.layers.0.mlp.down_proj.weight (of shape [96, 32], not [96, 160])"],
        ),
    ],
)
def test_missing_and_misshapen_weights_are_refused(tmp_path: Path, changes: dict[str, int], reasons: list[str]) -> None:
    message = refusal(edit_json(save_model(tmp_path, tiny_config()), **changes))
    assert all(reason in message for reason in ["cannot be loaded", *reasons])


def test_a_missing_head_is_refused_unless_it_is_tied(tmp_path: Path) -> None:
    tied = save_model(tmp_path, tiny_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    load_model(EngineOptions(model=str(tied)))
    assert "lack 1 of the model's weights: lm_head.weight" in refusal(edit_json(tied, tie_word_embeddings=False))


def test_unused_weights_are_harmless(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tiny_config())
    with edited_weights(folder) as weights:
        weights["reward_head.weight"] = torch.ones(4)
    assert load_engine(folder).bitwise


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", tiny_config())
    for name in ("model.safetensors", "tokenizer.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        assert "cannot be loaded" in refusal(folder)
        (folder / name).write_bytes(content)
    (folder / "model.safetensors").unlink()
    save_tokenizer(folder)
    message = refusal(folder)
    assert "cannot be loaded" in message
    assert "model.safetensors" in message
