"""Hostile safetensors files, indexes and configurations are refused in one line, before weights are read."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf_files import save_random_gguf
from tiny_models import edit_json, load_engine, refusal, save_model, small_config
from tiny_pair import tiny_config

from specpool.engine.models import weights

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", tiny_config())


def write_safetensors(file: Path, header: dict[str, Any] | bytes, data: int = 16, length: int | None = None) -> None:
    """Write a file with this header, which may claim another length, and bytes of data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data))


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}


@pytest.mark.parametrize(
    ("header", "length", "reason"),
    [
        ({"a": tensor(data_offsets=[0, 32], shape=[4, 2])}, None, "file not fully covered"),
        ({"a": tensor(), "b": tensor()}, None, "invalid offset for tensor"),
        ({"a": tensor(dtype="X9")}, None, "unknown variant `X9`"),
        ({"a": tensor(shape=[3, 2])}, None, "invalid shape, data type, or offset"),
        ({"a": tensor(shape=[2**62, 2**62])}, None, "overflow"),
        ({"a": tensor()}, 5000, "invalid header length"),
        (b'{"a":' + b"[" * 9999, None, "recursion limit exceeded"),
        (b"", None, "EOF while parsing"),
    ],
)
def test_invalid_headers_are_refused(
    folder: Path, header: dict[str, Any] | bytes, length: int | None, reason: str
) -> None:
    write_safetensors(folder / FILE, header, length=length)
    message = refusal(folder)
    assert f"{folder / FILE} is not a usable safetensors file: " in message
    assert reason in message


@pytest.mark.parametrize("size", [0, 7])
def test_files_without_a_header_are_refused(folder: Path, size: int) -> None:
    (folder / FILE).write_bytes(bytes(size))
    assert f"{folder / FILE} is not a usable safetensors file: header too small" in refusal(folder)


def test_large_headers_are_refused(folder: Path) -> None:
    write_safetensors(folder / FILE, {"a": tensor()}, length=2**24 + 1)
    assert refusal(folder).endswith(f"{folder / FILE}: its header has 16,777,217 bytes; the maximum is 16,777,216")


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (
            {"weight_map": {"a": "../other/model.safetensors"}},
            "weight_map has '../other/model.safetensors', which is no",
        ),
        ({"weight_map": {"a": "/etc/model.safetensors"}}, "weight_map has '/etc/model.safetensors', which is no"),
        ({"weight_map": {"a": "model.bin"}}, "weight_map has 'model.bin', which is no safetensors file beside it"),
        ({"weight_map": {"a": 1}}, "weight_map has '1', which is no"),
        ({"weight_map": {"a": "gone.safetensors"}}, "weight_map has gone.safetensors, which does not exist"),
        ({"weight_map": ["a"]}, "weight_map is not an object"),
        ({"weight_map": {}}, "weight_map is not an object"),
        ({}, "weight_map is not an object"),
        ([], " does not contain a JSON object"),
    ],
)
def test_indexes_name_safetensors_files_beside_them(folder: Path, index: object, reason: str) -> None:
    (folder.parent / "other").mkdir()
    (folder / FILE).rename(folder.parent / "other" / FILE)
    (folder / INDEX).write_text(json.dumps(index))
    message = refusal(folder)
    assert str(folder / INDEX) in message
    assert reason in message


def test_a_folder_with_an_index_is_a_model(folder: Path) -> None:
    (folder / FILE).rename(folder / "model-1-of-1.safetensors")
    names = json.loads((folder / "model-1-of-1.safetensors").read_bytes()[8:].partition(b"}}")[0] + b"}}").keys()
    parts = {name: "model-1-of-1.safetensors" for name in names if name != "__metadata__"}
    for index in ({"weight_map": parts}, {"weight_map": parts, "metadata": [1]}):
        (folder / INDEX).write_text(json.dumps(index))
        assert f'{folder / INDEX}: metadata is not an object; an empty one is enough: "metadata": {{}}' in refusal(
            folder
        )
    assert load_engine(edit_json(folder, INDEX, metadata={})).bitwise


# --- Configurations that claim more than the files


def test_more_layers_than_tensors_are_refused_before_they_are_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "read_with_transformers", lambda *_, **__: pytest.fail("the model was built"))
    edit_json(folder, num_hidden_layers=1000)
    assert refusal(folder).endswith("num_hidden_layers is 1,000, but the files have 30 tensors")


@pytest.mark.parametrize("changes", [{"vocab_size": 2**24}, {"intermediate_size": 2**24}])
def test_far_more_weights_than_the_files_have_are_refused(folder: Path, changes: dict[str, int]) -> None:
    message = refusal(edit_json(folder, **changes))
    assert "cannot be loaded: the configured model has " in message
    assert message.endswith("weights, but the files have 261,984")


def test_more_layers_than_tensors_of_a_gguf_file_are_refused(tmp_path: Path) -> None:
    file = save_random_gguf(tmp_path, lambda name: None)
    key = b"llama.block_count\4\0\0\0"
    content = file.read_bytes().replace(key + struct.pack("<I", 2), key + struct.pack("<I", 4000))
    file.write_bytes(content)
    assert refusal(file).endswith("num_hidden_layers is 4,000, but the files have 21 tensors")


def test_moe_and_other_architectures_pass_the_checks(tmp_path: Path) -> None:
    moe = small_config("mixtral", num_local_experts=2, num_experts_per_tok=1)
    assert load_engine(save_model(tmp_path, moe)).info().architecture == "mixtral"
