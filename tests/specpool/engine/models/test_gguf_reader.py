"""Tensors of GGUF files; damaged files are refused in one line that names file and tensor."""

import math
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGML
from gguf_files import random_rows, save_random_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import refusal

from specpool.engine.config.options import EngineOptions
from specpool.engine.models.facts import weights_fingerprint
from specpool.engine.models.gguf_header import GgufError
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.models.loading import load_model
from specpool.engine.weights.quantized import Quantized

UP = "blk.1.ffn_up.weight"


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor_info(name: str, shape: tuple[int, ...], qtype: int, offset: int = 0) -> bytes:
    """A tensor in a header. `shape`: as in the file, where the first dimension is contiguous."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + sizes + struct.pack("<IQ", qtype, offset)


def header(*tensors: bytes, values: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(values))
    return b"".join((b"GGUF", counts, *values, *tensors))


def padded(content: bytes, alignment: int = 32) -> bytes:
    return content + bytes(-len(content) % alignment)


def value(key: str, value_type: int, packed: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + packed


def array(key: str, element: int, count: int, packed: bytes = b"") -> bytes:
    return value(key, 9, struct.pack("<IQ", element, count) + packed)


def read(folder: Path, content: bytes) -> GgufFile:
    (folder / "model.gguf").write_bytes(content)
    return GgufFile(folder / "model.gguf")


def reason_for_refusal(folder: Path, content: bytes) -> str:
    """The reason for refusing a file, without its name."""
    with pytest.raises(GgufError) as caught:
        read(folder, content)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{folder / 'model.gguf'}")
    return message.removeprefix(f"{folder / 'model.gguf'}").removeprefix(": ")


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid file."""
    return save_random_gguf(tmp_path_factory.mktemp("valid"), lambda name: "Q4_1")


# --- Read


def test_tensors_are_read_after_any_metadata(tmp_path: Path) -> None:
    numbers = [value(f"n{kind}", kind, bytes(size)) for kind, size in ((0, 1), (3, 2), (5, 4), (6, 4), (7, 1), (12, 8))]
    strings = struct.pack("<IQ", 8, 2) + string("some") + string("words")
    nested = struct.pack("<IQ", 9, 2) + 2 * (struct.pack("<IQ", 4, 3) + bytes(12))
    values = (
        *numbers,
        value("general.architecture", 8, string("llama")),
        value("words", 9, strings),
        value("nested", 9, nested),
        value("general.alignment", 4, struct.pack("<I", 256)),
    )
    blocks = random_rows("Q4_1", 3, 64)
    tensors = (
        tensor_info("one", (6,), GGML.F32),
        tensor_info("three", (4, 3, 2), GGML.F16, 256),
        tensor_info("quantized", (64, 3), GGML.Q4_1, 512),
    )
    data = (np.arange(6, dtype=np.float32), np.arange(24, dtype=np.float16), blocks)
    file = read(tmp_path, b"".join(padded(part, 256) for part in (header(*tensors, values=values), *map(bytes, data))))
    one, three, quantized = (file.read(name) for name in ("one", "three", "quantized"))
    assert file.architecture == "llama"
    assert isinstance(one, torch.Tensor)
    assert isinstance(three, torch.Tensor)
    assert isinstance(quantized, Quantized)
    assert torch.equal(one, torch.arange(6.0))
    assert torch.equal(three, torch.arange(24.0).view(2, 3, 4))
    assert np.array_equal(quantized.data.numpy(), blocks)


def test_changing_a_tensor_does_not_change_the_file(valid: Path) -> None:
    before, file = valid.read_bytes(), GgufFile(valid)
    weight = file.read(UP)
    assert isinstance(weight, Quantized)
    weight.data[:] = 0
    assert valid.read_bytes() == before


# --- Refused


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", " is not a GGUF file: it is empty"),
        (b"GGML and so on", " is not a GGUF file"),
        (header(version=1), " is a GGUF file of version 1; versions 2 and 3 are supported"),
        (header(version=4), " is a GGUF file of version 4; versions 2 and 3 are supported"),
        (header(tensor_info("up", (32, 1), 99)), "tensor up has the unknown type 99"),
        (header(tensor_info("up", (48, 2), GGML.Q4_0)), "rows of 48 weights, not whole Q4_0 blocks of 32"),
        (header(tensor_info("up", (320, 2), GGML.Q6_K)), "rows of 320 weights, not whole Q6_K blocks of 256"),
        (padded(header(tensor_info("up", (4, 2), 0))) + bytes(31), "tensor up is truncated: 1 of 32 bytes are missing"),
        (padded(header(tensor_info("up", (2**40, 2**20), 0))), "truncated: 4,611,686,018,427,387,904 of 4,611,"),
        (header(values=(value("key", 13, b""),)), "its key has a value of type 13"),
        (header(tensor_info("up", (4,), 0))[:-1], "is not a complete GGUF file: it ends within"),
        (
            header()[:4] + struct.pack("<IQQ", 3, 2**63, 0),
            "has 9,223,372,036,854,775,808 tensors; the maximum is 65,536",
        ),
        (header()[:4] + struct.pack("<IQQ", 3, 0, 2**63), "has 9,223,372,036,854,775,808 key-value pairs; the maximum"),
        (header()[:4] + struct.pack("<IQQ", 3, 9, 0) + bytes(99), "has 9 tensors, but only 99 bytes follow"),
        (header()[:4] + struct.pack("<IQQ", 3, 0, 9) + bytes(99), "has 9 key-value pairs, but only 99 bytes follow"),
        (header(struct.pack("<Q", 2**62) + bytes(99)), "is not a complete GGUF file: it ends within"),
        (header(struct.pack("<Q", 1) + b"\xff" + bytes(99)), " is damaged: its header has a string that is not UTF-8"),
        (header(values=(value("a", 0, b"1"), value("a", 0, b"2"))), "its metadata has a twice"),
        (header(values=(value("a.scale", 6, struct.pack("<f", math.nan)),)), "its a.scale is nan"),
        (header(values=(array("words", 8, 2**40),)), "array elements up to words; the maximum is 2,097,152"),
        (
            header(values=(array("one", 0, 2**20, bytes(2**20)), array("two", 0, 2**20 + 1))),
            "elements up to two; the max",
        ),
        (
            header(values=(array("a", 0, 65_537, bytes(65_537)),)),
            "its arrays have 65,537 elements, too many for tensors of 0",
        ),
        (header(values=(array("words", 4, 30, bytes(119)),)), "has 30 elements in words, but only 119 bytes follow"),
        (header(values=(array("words", 8, 30, bytes(239)),)), "has 30 elements in words, but only 239 bytes follow"),
        (
            header(values=(array("words", 8, 1, string("x" * 4097)),)),
            "its words has a string of 4,097 bytes; the maximum",
        ),
        (header(values=(value("general.alignment", 4, bytes(4)),)), "its general.alignment is 0"),
        (header(values=(value("general.alignment", 8, string("x")),)), "its general.alignment is 'x'"),
        (
            header(values=(value("general.alignment", 4, struct.pack("<I", 3)),)),
            "general.alignment is 3, not a power of two",
        ),
        (
            header(values=(value("general.alignment", 5, struct.pack("<i", -32)),)),
            "general.alignment is -32, not a power of two",
        ),
        (header(values=(value("general.alignment", 7, b"\1"),)), "its general.alignment is True, not a power of two"),
        (padded(header(tensor_info("up", (8,), 0), tensor_info("up", (4,), 0))) + bytes(32), "it has two tensors up"),
        (
            padded(header(tensor_info("up", (8, 2), 0, 32), tensor_info("down", (9,), 0))) + bytes(96),
            "its tensors down and up overlap",
        ),
        (header(tensor_info("up", (4, 0), 0)), "tensor up has a dimension of 0"),
        (header(tensor_info("up", (1,) * 5, 0)), "tensor up has 5 dimensions; the maximum is 4"),
        (header(values=(value("deep", 9, 2000 * struct.pack("<IQ", 9, 1)),)), "its deep nests arrays more than 4 deep"),
        (
            header(values=(value("split.count", 2, struct.pack("<H", 3)),)),
            " is one of 3 parts of a model; name it NAME-00001-of-00003.gguf",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in reason_for_refusal(tmp_path, content)


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ((2**23, 0), "its header has 8,388,608 tensors; the maximum is 65,536"),
        ((0, 2**23), "its header has 8,388,608 key-value pairs; the maximum is 16,384"),
        ((1, 0), "its header has more than 67,108,864 bytes"),
    ],
)
def test_large_headers_are_refused(tmp_path: Path, counts: tuple[int, int], reason: str) -> None:
    file = tmp_path / "model.gguf"
    with file.open("wb") as sparse:
        sparse.write(b"GGUF" + struct.pack("<IQQQ", 3, *counts, 2**27))
        sparse.truncate(2**28)
    with pytest.raises(GgufError) as caught:
        GgufFile(file)
    assert str(caught.value) == f"{file} is damaged: {reason}"


@pytest.mark.parametrize(
    ("tensor", "content", "reason"),
    [
        (tensor_info("up", (4, 2), GGML.I32), bytes(32), "the unsupported type I32"),
        *(
            (tensor_info("up", (32, 1), GGML.Q4_0), struct.pack("<H16x", scale), "a scale that is infinite or NaN")
            for scale in (0x7C00, 0xFC00, 0x7E01)
        ),
    ],
)
def test_unusable_tensors_are_refused(tmp_path: Path, tensor: bytes, content: bytes, reason: str) -> None:
    file = read(tmp_path, padded(header(tensor)) + content)
    with pytest.raises(GgufError, match=f"tensor up has {reason}$"):
        file.read("up")


@settings(max_examples=40)
@given(end=st.floats(0, 1, exclude_max=True), place=st.integers(0, 1999), byte=st.integers(0, 255))
def test_truncated_and_corrupted_files_raise_only_gguf_errors(
    tmp_path_factory: pytest.TempPathFactory, valid: Path, end: float, place: int, byte: int
) -> None:
    content, folder = bytearray(valid.read_bytes()), tmp_path_factory.mktemp("damaged")
    assert reason_for_refusal(folder, bytes(content[: int(end * len(content))]))
    content[place] = byte
    with suppress(GgufError):
        read(folder, bytes(content))


# --- In an engine


@pytest.mark.parametrize("in_a_folder", [False, True])
def test_an_engine_refuses_damaged_files_in_one_line(tmp_path: Path, valid: Path, in_a_folder: bool) -> None:
    if in_a_folder:
        shutil.copytree(valid.parent / "saved", tmp_path, dirs_exist_ok=True)
        (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "model.gguf"
    content = valid.read_bytes()
    file.write_bytes(content[:-100])
    message = refusal(tmp_path if in_a_folder else file)
    assert f"{file}: tensor " in message
    assert "is truncated" in message
    for name in (UP, "output_norm.weight"):
        content = content.replace(string(name), string(name[:-1] + "x"))
    file.write_bytes(content)
    missing = "lack 2 of the model's weights: model.layers.1.mlp.up_proj.weight, model.norm.weight"
    assert missing in refusal(tmp_path if in_a_folder else file)


def test_a_folder_with_a_configuration_and_one_gguf_file_is_a_model(tmp_path: Path, valid: Path) -> None:
    shutil.copytree(valid.parent / "saved", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    shutil.copy(valid, tmp_path / "some.gguf")
    beside, alone = (load_model(EngineOptions(model=str(model), device="cpu")) for model in (tmp_path, valid))
    assert weights_fingerprint(beside) == weights_fingerprint(alone)
    shutil.copy(valid, tmp_path / "other.gguf")
    message = refusal(tmp_path)
    assert message.endswith("has several GGUF files (other.gguf, some.gguf); name one of them as the model")
