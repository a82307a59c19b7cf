"""Every key of the specification is applied to the configuration, has no effect, or refuses the file by its name."""

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
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.sliding_window": 32,
}
# Their values say nothing that a pass could apply, or nothing without a second key.
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
    """The header of a small file with the keys that its architecture needs."""
    keys = {key: VALUES.get(key, 1e-5 if "epsilon" in key else 8) for key in FAMILIES[architecture].required}
    keys = {**keys, "attention.head_count_kv": 2, **more}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    file = SimpleNamespace(path=Path("some.gguf"), architecture=architecture, metadata=metadata, tensors={})
    return cast(GgufFile, file)


def outcome(file: GgufFile) -> dict[str, Any] | str:
    """The fields of a configuration, or the reason for the refusal."""
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
    for key in FAMILIES[architecture].required:
        file = header(architecture)
        del file.metadata[f"{architecture}.{key}"]
        assert f"some.gguf: {architecture}.{key} is " in str(outcome(file))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (
            "expert_count",
            8,
            "llama.expert_count is 8: the model is a mixture of experts, which is not",
        ),
        (
            "ssm.state_size",
            16,
            "llama.ssm.state_size is 16: the model is a state-space hybrid, which is not",
        ),
        ("attention.head_count_kv", [2, 1], "llama.attention.head_count_kv is an array: one value for all layers"),
        ("feed_forward_length", [96, 64], "llama.feed_forward_length is an array: one value for all layers"),
        ("attention.value_length", 32, "llama.attention.value_length is 32: keys have the size 16"),
        ("attention.causal", False, "llama.attention.causal is False: it is not supported for llama models"),
        ("attention.scale", 0.5, "llama.attention.scale is 0.5: it is not supported for llama models"),
        ("logit_scale", 0.5, "llama.logit_scale is 0.5: it is not supported for llama models"),
        ("attn_logit_softcapping", 50.0, "llama.attn_logit_softcapping is 50.0: it is not supported"),
        ("use_parallel_residual", True, "llama.use_parallel_residual is True: it is not supported"),
        ("no_such_key", 1, "llama.no_such_key is 1: it is not supported for llama models and may change their results"),
        ("attention.layer_norm_rms_epsilon", None, "llama.attention.layer_norm_rms_epsilon is missing"),
        ("attention.layer_norm_rms_epsilon", "x", "llama.attention.layer_norm_rms_epsilon is 'x': a positive number"),
        ("attention.sliding_window", -1.0, "llama.attention.sliding_window is -1.0: a whole number is needed"),
    ],
)
def test_files_are_refused_by_the_keys_name(tmp_path: Path, llama: Path, key: str, value: Any, reason: str) -> None:
    message = refusal(edited_gguf(llama, tmp_path / "other.gguf", {f"llama.{key}": value}))
    assert reason in message
    assert value is None or message.endswith("see docs/faults.md, GGUF files")


def test_a_refusal_needs_no_weights(tmp_path: Path, llama: Path) -> None:
    """The weights hold an infinite scale, which reading them would report."""
    file = edited_gguf(llama, tmp_path / "other.gguf", {"llama.expert_count": 8})
    content = bytearray(file.read_bytes())
    content[-34 * 64 :] = b"\x00\x7c" * (17 * 64)
    file.write_bytes(content)
    assert "llama.expert_count is 8" in refusal(file)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"general.architecture": "mamba", "mamba.ssm.state_size": 16}, "mamba (a state-space hybrid)"),
        ({"general.architecture": "gpt-oss", "gpt-oss.expert_count": 32}, "gpt-oss (a mixture of experts)"),
        ({"general.architecture": "mistral"}, "general.architecture is mistral; GGUF files are served for llama, "),
        ({"general.type": "adapter"}, "general.type is adapter, not model"),
    ],
)
def test_other_architectures_are_refused_by_name(
    tmp_path: Path, llama: Path, keys: dict[str, Any], reason: str
) -> None:
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


def test_a_window_limits_the_length(tmp_path: Path, llama: Path) -> None:
    file = edited_gguf(llama, tmp_path / "window.gguf", {"llama.attention.sliding_window": 32})
    assert load_config(EngineOptions(model=str(file), max_model_len=32)).sliding_window == 32
    assert "has a sliding window of 32 positions" in refusal(file, max_model_len=33)


def test_absent_keys_have_the_defaults_of_llama_cpp(tmp_path: Path) -> None:
    file = save_random_gguf(tmp_path, lambda name: None, "qwen2", num_key_value_heads=4)
    absent = dict.fromkeys(
        ("rope.freq_base", "rope.dimension_count", "attention.head_count_kv", "attention.key_length"), None
    )
    bare = edited_gguf(file, tmp_path / "bare.gguf", {f"qwen2.{key}": value for key, value in absent.items()})
    config = load_config(EngineOptions(model=str(bare)))
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert config.rope_parameters["rope_theta"] == 10_000.0
