"""Split GGUF files are read as one, given any part or their folder, and refused if the parts do not match."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf_converter import split
from gguf_files import save_random_gguf
from tiny_models import load_engine, refusal

COUNT = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_gguf(tmp_path_factory.mktemp("whole"), lambda name: "Q8_0")


@pytest.fixture
def parts(tmp_path: Path, whole: Path) -> list[Path]:
    folder = tmp_path / "parts"
    folder.mkdir()
    return split(whole, folder, COUNT)


def test_any_part_or_the_folder_gives_the_whole_model(parts: list[Path], whole: Path) -> None:
    expected = load_engine(whole).weights_fingerprint
    for model in (*parts, parts[0].parent):
        assert load_engine(model).weights_fingerprint == expected


def test_a_folder_may_have_a_configuration(parts: list[Path], whole: Path) -> None:
    folder = parts[0].parent
    shutil.copytree(whole.parent / "saved", folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    assert load_engine(folder).weights_fingerprint == load_engine(whole).weights_fingerprint
    shutil.copy(whole, folder / "other.gguf")
    assert "has several GGUF files" in refusal(folder)


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[2].unlink()
    for model in (parts[0], parts[1], parts[0].parent):
        assert refusal(model).endswith("is one of 3 parts of a model, but model-00003-of-00003.gguf is missing")


def test_parts_must_be_named_by_their_number(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[0])
    assert refusal(parts[2]).endswith("model-00001-of-00003.gguf: split.no is 1, not 0")
    renamed = parts[2].rename(parts[2].with_name("some.gguf"))
    assert "is one of 3 parts of a model; name it NAME-00001-of-00003.gguf" in refusal(renamed)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensors.count": 20}, "split.tensors.count is 20, but its parts have 21 tensors"),
        ({"count": 4}, "is one of 4 parts of a model, but model-00001-of-00004.gguf is missing"),
        ({"count": 5000}, "split.count is 5000; it must be a whole number up to 1,024"),
        ({"no": 2}, "split.no is 2, not 0"),
    ],
)
def test_counts_must_match(parts: list[Path], whole: Path, changes: dict[str, Any], reason: str) -> None:
    split(whole, parts[0].parent, COUNT, **changes)
    assert reason in refusal(parts[1])


def test_a_tensor_in_two_parts_is_refused(parts: list[Path], whole: Path) -> None:
    other = split(whole, whole.parent, COUNT + 1)[1]
    content = other.read_bytes().replace(b"split.count\x02\0\0\0\x04", b"split.count\x02\0\0\0\x03")
    parts[1].write_bytes(content)
    assert "model-00002-of-00003.gguf: tensor " in refusal(parts[0])
    assert refusal(parts[0]).endswith(" is also in model-00001-of-00003.gguf")


def test_metadata_of_a_later_part_must_match_the_first(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes().replace(b"split.tensors.count", b"llama.some.other.kv"))
    reason = "key llama.some.other.kv is missing from model-00001-of-00003.gguf or differs there"
    assert refusal(parts[0]).endswith(reason)
