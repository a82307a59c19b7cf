"""Values of a configuration have the right type and size; others are refused in one line that names them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf_files import edited_gguf, save_random_gguf
from tiny_models import edit_json, refusal, save_model
from tiny_pair import tiny_config

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config import load_config
from specpool.engine.models.config_values import check_sizes
from specpool.engine.models.preflight import InvalidOptionError, check_options


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_gguf(tmp_path_factory.mktemp("valid"), lambda name: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_config(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


def refusals(folder: Path) -> list[str]:
    """The reasons of loading and of the checks of options."""
    with pytest.raises(InvalidOptionError) as caught:
        check_options(EngineOptions(model=str(folder)))
    return [refusal(folder), str(caught.value).removeprefix("model: ")]


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("num_hidden_layers", -1, "4,096"),
        ("num_hidden_layers", 0, "4,096"),
        ("num_hidden_layers", 100_000, "4,096"),
        ("num_hidden_layers", 2.0, "4,096"),
        ("num_hidden_layers", True, "4,096"),
        ("num_hidden_layers", [2], "4,096"),
        ("num_attention_heads", 0, "65,536"),
        ("num_attention_heads", "6", "65,536"),
        ("num_key_value_heads", -2, "65,536"),
        ("head_dim", 2**40, "65,536"),
        ("hidden_size", {}, "1,048,576"),
        ("intermediate_size", [64, 0], "16,777,216"),
        ("vocab_size", -5, "16,777,216"),
        ("max_position_embeddings", 10**30, "2,147,483,648"),
        ("max_position_embeddings", 0, "2,147,483,648"),
        ("linear_num_key_heads", 0, "65,536"),
        ("linear_num_value_heads", "4", "65,536"),
        ("linear_key_head_dim", -1, "65,536"),
        ("linear_value_head_dim", 2**20, "65,536"),
        ("linear_conv_kernel_dim", 65, "64"),
        ("conv_L_cache", 65, "64"),
        ("kv_lora_rank", 0, "1,048,576"),
        ("v_head_dim", -1, "65,536"),
        ("block_multiple_of", 0, "16,777,216"),
    ],
)
def test_sizes_beyond_their_limits_are_refused(folder: Path, name: str, value: Any, limit: str) -> None:
    edit_json(folder, **{name: value})
    for message in refusals(folder):
        assert message.startswith(f"{folder / 'config.json'}: {name} is ")
        assert message.endswith(f"; it must be a whole number from 1 to {limit}")


def test_other_names_and_parts_are_checked() -> None:
    for config in ({"n_layer": 10**9}, {"text_config": {"num_hidden_layers": 0}}, {"d_model": -1}):
        with pytest.raises(UnsupportedModelError, match=r"^file: .* must be a whole number from 1 to "):
            check_sizes(config, "file")
    check_sizes({"n_layer": 2, "head_dim": None, "intermediate_size": [8, 16], "text_config": {}}, "file")


def test_heads_are_a_multiple_of_kv_heads(folder: Path) -> None:
    edit_json(folder, num_attention_heads=6, num_key_value_heads=4)
    for message in refusals(folder):
        assert message.endswith("num_attention_heads is 6, not a multiple of num_key_value_heads 4")
    edit_json(folder, num_attention_heads=8, linear_num_value_heads=6, linear_num_key_heads=4)
    for message in refusals(folder):
        assert message.endswith("linear_num_value_heads is 6, not a multiple of linear_num_key_heads 4")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "rope_scaling.factor is 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": "1"}}, "rope_scaling.mscale is '1'"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"linear_attn_config": None}, "linear_attn_config is None"),
        ({"linear_attn_config": {"full_attn_layers": [0]}}, "linear_attn_config.full_attn_layers.0 is 0"),
    ],
)
def test_values_have_their_type_and_range(folder: Path, changes: dict[str, Any], reason: str) -> None:
    edit_json(folder, **changes)
    for message in refusals(folder):
        assert message.startswith(f"{folder / 'config.json'}: {reason}: Input should be ")


def test_defaults_of_an_architecture_are_checked(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["num_attention_heads"]  # 32 by default
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 5}))
    assert "num_attention_heads is 32, not a multiple of num_key_value_heads 5" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"rope_theta": NaN}', "config.json is not a JSON file: it contains NaN"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "config.json is nested too deeply; the maximum is 32"),
        ('{"a": ' + "[" * 100_000, "config.json is nested too deeply; the maximum is 32"),
    ],
)
def test_unreadable_configurations_are_refused(folder: Path, content: str, reason: str) -> None:
    (folder / "config.json").write_text(content)
    assert all(message.endswith(reason) for message in refusals(folder))


@pytest.mark.parametrize(
    ("name", "limit"), [("config.json", 2**22), ("tokenizer.json", 2**26), ("chat_template.jinja", 2**26)]
)
def test_large_files_are_refused(tmp_path: Path, name: str, limit: int) -> None:
    folder = save_model(tmp_path, tiny_config())
    with (folder / name).open("a") as sparse:
        sparse.truncate(2**33)
    for message in refusals(folder):
        assert message == f"{folder / name} has 8,589,934,592 bytes; the maximum is {limit:,}"


# --- GGUF files


@pytest.mark.parametrize(
    ("key", "number", "limit"),
    [
        ("block_count", 0, "4,096"),
        ("block_count", 100_000, "4,096"),
        ("attention.head_count", 0, "65,536"),
        ("attention.head_count_kv", 2**31, "65,536"),
        ("embedding_length", 0, "1,048,576"),
        ("feed_forward_length", 2**32 - 1, "16,777,216"),
        ("context_length", 0, "2,147,483,648"),
    ],
)
def test_sizes_in_gguf_files_are_checked(tmp_path: Path, valid: Path, key: str, number: int, limit: str) -> None:
    file, name = tmp_path / "model.gguf", f"llama.{key}".encode() + struct.pack("<I", 4)
    before, _, after = valid.read_bytes().partition(name)
    file.write_bytes(before + name + struct.pack("<I", number) + after[4:])
    expected = f"{file}: llama.{key} is {number}; it must be a whole number from 1 to {limit}"
    assert refusal(file) == expected


def test_a_list_of_block_counts_is_refused(tmp_path: Path, valid: Path) -> None:
    file = edited_gguf(valid, tmp_path / "model.gguf", {"llama.block_count": [100_000]})
    with pytest.raises(UnsupportedModelError, match=r"llama.block_count is an array; it must be"):
        load_config(EngineOptions(model=str(file)))
