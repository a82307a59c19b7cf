"""Every key of the specification is applied, has no effect, or causes a refusal that names it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import pytest
from gguf_files import edited_gguf, save_random_gguf
from tiny_models import refusal

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config import load_config
from specpool.engine.models.gguf_keys import FAMILIES, config_fields
from specpool.engine.models.gguf_reader import GgufFile

VALUES = {
    "context_length": 128,
    "embedding_length": 64,
    "block_count": 8,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.sliding_window": 32,
    "expert_count": 4,
    "expert_used_count": 2,
}
# Keys without an effect of their own, or without an effect unless another key is set.
WITHOUT_EFFECT = {
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "pooling_type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
}
RESCALED = ("factor", "attn_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_ext_factor")
ALREADY_TRUE = {
    ("attention.causal", True),
    ("expert_weights_norm", True),
    ("expert_gating_func", 3),
    *((f"expert_{key}", 1) for key in ("gating_func", "weights_scale", "group_count", "group_used_count")),
    *((key, 1) for key in ("logit_scale", "residual_scale", "embedding_scale")),
    *((f"rope.scaling.{key}", 1) for key in RESCALED),
}
KEYS = sorted(
    value.removeprefix("{arch}.")
    for group in vars(gguf.Keys).values()
    if isinstance(group, type)
    for value in vars(group).values()
    if isinstance(value, str) and value.startswith("{arch}.")
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_gguf(tmp_path_factory.mktemp("llama"), lambda name: "Q8_0")


def header(architecture: str, **more: object) -> GgufFile:
    """Return the header of a small file with the keys that its architecture requires."""
    keys = {key: VALUES.get(key, 1e-5 if "epsilon" in key else 8) for key in FAMILIES[architecture].required}
    keys = {**keys, "attention.head_count_kv": 2, **more}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    file = SimpleNamespace(path=Path("some.gguf"), architecture=architecture, metadata=metadata, tensors={}, arrays={})
    return cast(GgufFile, file)


def outcome(file: GgufFile) -> dict[str, Any] | str:
    """Return the fields of the configuration, or the reason for the refusal."""
    try:
        return config_fields(file)
    except UnsupportedModelError as error:
        return str(error)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_key_of_the_specification_is_applied_or_refused(architecture: str) -> None:
    before = config_fields(header(architecture))
    for key in KEYS:
        for value in (3, 0.75, True, None):
            result = outcome(header(architecture, **{key: value}))
            if isinstance(result, str):
                # The sizes of embeddings and heads depend on each other.
                assert f"some.gguf: {architecture}.{key} is " in result or key in VALUES
            else:
                assert result != before or key in WITHOUT_EFFECT or (key, value) in ALREADY_TRUE


@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_keys_are_refused(architecture: str) -> None:
    for key in FAMILIES[architecture].required.keys() - FAMILIES[architecture].defaults.keys():
        file = header(architecture)
        del file.metadata[f"{architecture}.{key}"]
        assert f"some.gguf: {architecture}.{key} is " in str(outcome(file))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (
            "expert_used_count",
            8,
            "llama.expert_used_count is 8: it is not supported for llama models",
        ),
        (
            "ssm.state_size",
            16,
            "llama.ssm.state_size is 16: the model is a state-space hybrid, which llama files do not support",
        ),
        ("attention.head_count_kv", [2, 1], "llama.attention.head_count_kv is an array: only one value for all layers"),
        ("feed_forward_length", [96, 64], "llama.feed_forward_length is an array: only one value for all layers"),
        ("attention.value_length", 32, "llama.attention.value_length is 32: it must equal the key length of 16"),
        ("attention.causal", False, "llama.attention.causal is False: it is not supported for llama models"),
        ("attention.scale", 0.5, "llama.attention.scale is 0.5: it is not supported for llama models"),
        ("logit_scale", 0.5, "llama.logit_scale is 0.5: it is not supported for llama models"),
        ("attn_logit_softcapping", 50.0, "llama.attn_logit_softcapping is 50.0: it is not supported"),
        ("use_parallel_residual", True, "llama.use_parallel_residual is True: it is not supported"),
        ("no_such_key", 1, "llama.no_such_key is 1: it is not supported for llama models and may change their results"),
        ("attention.layer_norm_rms_epsilon", None, "llama.attention.layer_norm_rms_epsilon is missing"),
        (
            "attention.layer_norm_rms_epsilon",
            "x",
            "attention.layer_norm_rms_epsilon is 'x': it must be a positive",
        ),
        ("attention.sliding_window", -1.0, "llama.attention.sliding_window is -1.0: it must be a whole number"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, llama: Path, key: str, value: Any, reason: str) -> None:
    message = refusal(edited_gguf(llama, tmp_path / "other.gguf", {f"llama.{key}": value}))
    assert reason in message
    assert value is None or message.endswith("see docs/faults.md, GGUF files")


def test_files_are_refused_before_weights_are_read(tmp_path: Path, llama: Path) -> None:
    """Reading the weights would report their infinite scale."""
    file = edited_gguf(llama, tmp_path / "other.gguf", {"llama.expert_weights_scale": 2.0})
    content = bytearray(file.read_bytes())
    content[-34 * 64 :] = b"\x00\x7c" * (17 * 64)
    file.write_bytes(content)
    assert "llama.expert_weights_scale is 2.0" in refusal(file)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"general.architecture": "mamba", "mamba.ssm.state_size": 16}, "mamba (a state-space hybrid)"),
        ({"general.architecture": "qwen35", "qwen35.ssm.state_size": 128}, "qwen35 (a state-space hybrid)"),
        ({"general.architecture": "dbrx", "dbrx.expert_count": 32}, "dbrx (a mixture of experts)"),
        ({"general.architecture": "mistral"}, "general.architecture is mistral; GGUF files are served for llama, "),
        ({"general.type": "adapter"}, "general.type is adapter, not model"),
    ],
)
def test_refusals_name_the_architecture(tmp_path: Path, llama: Path, keys: dict[str, Any], reason: str) -> None:
    assert reason in refusal(edited_gguf(llama, tmp_path / "other.gguf", keys))


def test_metadata_and_neutral_values_are_accepted(tmp_path: Path, llama: Path) -> None:
    keys = {
        "general.name": "mistral",  # transformers takes it for another family
        "quantize.imatrix.file": "some",
        "vendor.note": 1,
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.tensor_data_layout": "Meta AI original pth",
        "llama.logit_scale": 1.0,
    }
    config = load_config(EngineOptions(model=str(edited_gguf(llama, tmp_path / "same.gguf", keys))))
    plain = load_config(EngineOptions(model=str(llama)))
    assert (config.rope_parameters, config.head_dim) == (plain.rope_parameters, plain.head_dim)
    assert config.sliding_window is None


def test_absent_keys_default_as_in_llama_cpp(tmp_path: Path) -> None:
    file = save_random_gguf(tmp_path, lambda name: None, "qwen2", num_key_value_heads=4)
    absent = dict.fromkeys(
        ("rope.freq_base", "rope.dimension_count", "attention.head_count_kv", "attention.key_length"), None
    )
    bare = edited_gguf(file, tmp_path / "bare.gguf", {f"qwen2.{key}": value for key, value in absent.items()})
    config = load_config(EngineOptions(model=str(bare)))
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert config.rope_parameters["rope_theta"] == 10_000.0
