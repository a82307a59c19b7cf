"""Damaged GGUF files, and those of another kind: each is refused in one line, which names the file and the tensor."""

import shutil
import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import gguf_config, random_rows, save_random_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import refusal, save_model

from specpool.engine.config.options import EngineOptions
from specpool.engine.models.fingerprints import weights_fingerprint
from specpool.engine.models.gguf_file import GgufError, GgufFile
from specpool.engine.models.loading import load_model
from specpool.engine.weights.quantized import Quantized

UP = "blk.1.ffn_up.weight"


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def described(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    """A tensor in a header. `shape`: as in the file, where the dimension of neighbours is the first."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def header(*tensors: bytes, values: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(values))
    return b"".join((b"GGUF", counts, *values, *tensors))


def padded(whole: bytes, alignment: int = 32) -> bytes:
    return whole + bytes(-len(whole) % alignment)


def value(key: str, kind: int, packed: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + packed


def read(folder: Path, content: bytes) -> GgufFile:
    (folder / "model.gguf").write_bytes(content)
    return GgufFile(folder / "model.gguf")


def refused(folder: Path, content: bytes) -> str:
    """Why the file is not read, after its name."""
    with pytest.raises(GgufError) as caught:
        read(folder, content)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{folder / 'model.gguf'}")
    return message.removeprefix(f"{folder / 'model.gguf'}").removeprefix(": ")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good file."""
    return save_random_gguf(tmp_path_factory.mktemp("whole"), lambda name: "Q4_1")


# --- Read


def test_tensors_of_all_dimensions_and_types_are_read(tmp_path: Path) -> None:
    floats, halves = np.arange(6, dtype=np.float32), np.arange(24, dtype=np.float16)
    blocks = random_rows("Q4_1", 3, 64)
    tensors = (
        described("one", (6,), GGMLQuantizationType.F32),
        described("three", (4, 3, 2), GGMLQuantizationType.F16, 32),
        described("coded", (64, 3), GGMLQuantizationType.Q4_1, 96),
    )
    content = padded(header(*tensors)) + padded(floats.tobytes()) + padded(halves.tobytes()) + blocks.tobytes()
    file = read(tmp_path, content)
    one, three, coded = (file.read(name) for name in ("one", "three", "coded"))
    assert isinstance(one, torch.Tensor)
    assert isinstance(three, torch.Tensor)
    assert isinstance(coded, Quantized)
    assert torch.equal(one, torch.arange(6.0))
    assert torch.equal(three, torch.arange(24.0).view(2, 3, 4))
    assert np.array_equal(coded.data.numpy(), blocks)


def test_values_of_every_type_are_skipped_and_the_alignment_counts(tmp_path: Path) -> None:
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
    content = padded(header(described("t", (2,), 0), values=values), 256) + struct.pack("<2f", 1.5, -2)
    file = read(tmp_path, content)
    assert file.architecture == "llama"
    found = file.read("t")
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [1.5, -2]


def test_what_is_kept_cannot_be_changed_in_the_file(whole: Path) -> None:
    before, file = whole.read_bytes(), GgufFile(whole)
    kept = file.read(UP)
    assert isinstance(kept, Quantized)
    kept.data[:] = 0
    assert whole.read_bytes() == before


# --- Refused


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", " is not a GGUF file: it is empty"),
        (b"GGML and so on", " is not a GGUF file"),
        (header(version=1), " is a GGUF file of version 1; versions 2 and 3 are read"),
        (header(version=4), " is a GGUF file of version 4; versions 2 and 3 are read"),
        (header(described("up", (32, 1), 99)), "tensor up has the type 99, which is not known"),
        (
            header(described("up", (48, 2), GGMLQuantizationType.Q4_0)),
            "tensor up has rows of 48 weights, no multiple of the 32 in a block of Q4_0",
        ),
        (
            header(described("up", (320, 2), GGMLQuantizationType.Q6_K)),
            "tensor up has rows of 320 weights, no multiple of the 256 in a block of Q6_K",
        ),
        (
            padded(header(described("up", (4, 2), 0))) + bytes(31),
            "tensor up is cut off: the file lacks 1 of its 32 bytes",
        ),
        (
            padded(header(described("up", (2**40, 2**20), 0))),
            "tensor up is cut off: the file lacks 4,611,686,018,427,387,904 of its 4,611,686,018,427,387,904 bytes",
        ),
        (header(values=(value("key", 13, b""),)), "its metadata has a value of type 13"),
        (header(described("up", (4,), 0))[:-1], " is not a whole GGUF file: it ends within its header"),
        (header()[:4] + struct.pack("<IQQ", 3, 2**63, 2**63), " is not a whole GGUF file: it ends within its header"),
        (header(struct.pack("<Q", 2**62) + b"name"), " is not a whole GGUF file: it ends within its header"),
        (header(struct.pack("<Q", 1) + b"\xff"), " is damaged: its header has a text that is not UTF-8"),
        (header(values=(value("general.alignment", 4, bytes(4)),)), "its general.alignment is 0"),
        (header(values=(value("general.alignment", 8, string("x")),)), "its general.alignment is 'x'"),
        (
            header(values=(value("general.alignment", 4, struct.pack("<I", 3)),)),
            "its general.alignment is 3, no power of two",
        ),
        (header(values=(value("general.alignment", 7, b"\1"),)), "its general.alignment is True, no power of two"),
        (padded(header(described("up", (8,), 0), described("up", (4,), 0))) + bytes(32), "it has two tensors up"),
        (header(described("up", (4, 0), 0)), "tensor up has a dimension of 0"),
        (header(described("up", (1,) * 5, 0)), "tensor up has 5 dimensions; at most 4 are read"),
        (header(struct.pack("<Q", 1) + b"\xff"), "its header has a text that is not UTF-8"),
        (
            header(values=(value("deep", 9, 2000 * struct.pack("<IQ", 9, 1)),)),
            "its metadata has too many arrays in arrays",
        ),
        (
            header(values=(value("split.count", 2, struct.pack("<H", 3)),)),
            " is one of 3 parts of a model; llama.cpp's ",
        ),
    ],
)
def test_a_damaged_file_is_refused_with_the_name_of_its_tensor(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refused(tmp_path, content)


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1))
def test_no_file_is_read_that_ends_too_early(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, share: float
) -> None:
    content = whole.read_bytes()
    assert refused(tmp_path_factory.mktemp("cut"), content[: int(share * (len(content) - 1))])


@settings(max_examples=60, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_changed_byte_raises_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, place: float, byte: int
) -> None:
    content = bytearray(whole.read_bytes())
    content[int(place * 2000)] = byte
    path = tmp_path_factory.mktemp("changed") / "model.gguf"
    path.write_bytes(content)
    with suppress(GgufError):
        GgufFile(path)


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_no_finite_number_names_its_tensor(tmp_path: Path, half: int) -> None:
    blocks = struct.pack("<H16x", 0x3C00) + struct.pack("<H16x", half)
    content = padded(header(described("up", (32, 2), GGMLQuantizationType.Q4_0))) + blocks
    with pytest.raises(GgufError, match=r"tensor up has a block whose scale is infinite or not a number$"):
        read(tmp_path, content).read("up")


def test_a_type_that_cannot_be_unpacked_names_its_tensor(tmp_path: Path) -> None:
    content = padded(header(described("up", (4, 2), GGMLQuantizationType.I32))) + bytes(32)
    with pytest.raises(GgufError, match=r"tensor up has the type I32, which is not read$"):
        read(tmp_path, content).read("up")


# --- Refused by an engine, as a file and beside a configuration


def patched(whole: Path, path: Path, name: str, **changes: int) -> Path:
    """A copy of a file whose header gives another `kind` of a tensor, or another first size, `columns`."""
    content = bytearray(whole.read_bytes())
    at = content.index(string(name)) + len(string(name))
    (dimensions,) = struct.unpack_from("<I", content, at)
    for key, number in changes.items():
        form, place = ("<I", at + 4 + 8 * dimensions) if key == "kind" else ("<Q", at + 4)
        struct.pack_into(form, content, place, number)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": 77}, f"tensor {UP} has the type 77, which is not known"),
        ({"columns": 40}, f"tensor {UP} has rows of 40 weights, no multiple of the 32 in a block of Q4_1"),
        ({"columns": 2**30}, f"tensor {UP} is cut off: the file lacks "),
        ({"columns": 32}, "lack 1 of the weights that it needs: model.layers.1.mlp.up_proj.weight (of shape [96, 64]"),
        ({"kind": GGMLQuantizationType.I8, "columns": 32}, f"tensor {UP} has the type I8, which is not read"),
    ],
)
@pytest.mark.parametrize("in_a_folder", [False, True])
def test_an_engine_refuses_it_in_one_line(
    tmp_path: Path, whole: Path, changes: dict[str, int], reason: str, in_a_folder: bool
) -> None:
    if in_a_folder:
        shutil.copytree(whole.parent / "saved", tmp_path, dirs_exist_ok=True)
        (tmp_path / "model.safetensors").unlink()
    file = patched(whole, tmp_path / "model.gguf", UP, **changes)
    message = refusal(tmp_path if in_a_folder else file)
    assert reason in message
    assert str(tmp_path) in message


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, whole: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(whole.read_bytes()[:-100])
    message = refusal(file)
    assert f"{file}: tensor " in message
    assert "is cut off" in message


def test_tensors_that_are_missing_are_never_made_up(tmp_path: Path, whole: Path) -> None:
    content = whole.read_bytes()
    for name in (UP, "output_norm.weight"):
        assert content.count(string(name)) == 1
        content = content.replace(string(name), string(name[:-1] + "x"))
    (tmp_path / "model.gguf").write_bytes(content)
    message = refusal(tmp_path / "model.gguf")
    assert "lack 2 of the weights that it needs: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message


def test_a_folder_with_a_configuration_and_one_file_is_a_model(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole.parent / "saved", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    shutil.copy(whole, tmp_path / "some.gguf")
    beside, alone = (load_model(EngineOptions(model=str(model), device="cpu")) for model in (tmp_path, whole))
    assert weights_fingerprint(beside) == weights_fingerprint(alone)
    shutil.copy(whole, tmp_path / "other.gguf")
    message = refusal(tmp_path)
    assert message.endswith("has several GGUF files (other.gguf, some.gguf); name one of them as the model")


def test_a_file_of_another_architecture_than_its_configuration_is_refused(tmp_path: Path, whole: Path) -> None:
    save_model(tmp_path, gguf_config("qwen3"))
    (tmp_path / "model.safetensors").unlink()
    shutil.copy(whole, tmp_path / "some.gguf")
    assert "lack 4 of the weights that it needs: model.layers.0.self_attn.k_norm.weight" in refusal(tmp_path)


def test_the_reader_of_the_package_finds_the_same(whole: Path) -> None:
    file = GgufFile(whole)
    reader = gguf.GGUFReader(whole)
    assert {tensor.name for tensor in reader.tensors} == file.tensors.keys()
    for tensor in reader.tensors:
        its = file.tensors[tensor.name]
        assert (its.kind, its.offset, its.size) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert its.shape == tuple(tensor.shape.tolist()[::-1])
