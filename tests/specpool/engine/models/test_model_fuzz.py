"""Every mutant of a model's files is loaded, or refused in one line, within bounded memory."""

import random
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf_files import save_random_gguf
from mutants import mutate_bytes, mutate_json
from tiny_models import save_model, small_config

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.facts import read_facts
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.models.loading import load_model

MUTANTS = 25
MAX_GROWTH = 256 * 2**20
"""Maximum bytes that this process may grow by while it loads all mutants of a file, which have 400 kB at most."""


@pytest.fixture(scope="module", autouse=True)
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load a model of each format, so that their libraries do not count as growth."""
    load_model(EngineOptions(model=str(save_random_gguf(tmp_path_factory.mktemp("first"), q8)), device="cpu"))
    folder = save_model(tmp_path_factory.mktemp("second"), small_config("llama"))
    load_model(EngineOptions(model=str(folder), device="cpu"))


def q8(name: str) -> str | None:
    return None if "q_proj" in name else "Q8_0"


def outcome(model: Path) -> str:
    """Load a model: "loaded" or "refused"."""
    try:
        read_facts(load_model(EngineOptions(model=str(model), device="cpu")))
    except UnsupportedModelError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 600, message
        return "refused"
    return "loaded"


@contextmanager
def bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH


def outcomes(file: Path, model: Path, mutate: Callable[[bytes, random.Random], bytes]) -> Counter[str]:
    content = file.read_bytes()
    found: Counter[str] = Counter()
    with bounded_memory():
        for seed in range(MUTANTS):
            file.write_bytes(mutate(content, random.Random(seed)))
            found[outcome(model)] += 1
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_files(tmp_path: Path, architecture: str) -> None:
    file = save_random_gguf(tmp_path, q8, architecture)
    header = min(tensor.offset for tensor in GgufFile(file).tensors.values())
    found = outcomes(file, file, lambda content, chance: mutate_bytes(content, chance, header))
    assert found["refused"] > MUTANTS // 2


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_configurations(tmp_path: Path, architecture: str) -> None:
    folder = save_model(tmp_path, small_config(architecture))
    found = outcomes(folder / "config.json", folder, mutate_json)
    assert found["refused"] > MUTANTS // 2
    assert found["loaded"]


def test_safetensors_files(tmp_path: Path) -> None:
    folder = save_model(tmp_path, small_config("llama"))
    found = outcomes(folder / "model.safetensors", folder, lambda content, chance: mutate_bytes(content, chance, 2500))
    assert found["refused"] > MUTANTS // 2


def test_safetensors_indexes(tmp_path: Path) -> None:
    folder = save_model(tmp_path, small_config("llama"))
    shutil.move(folder / "model.safetensors", folder / "some.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": "some.safetensors"}}')
    assert outcomes(index, folder, mutate_json)["refused"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_other_files(tmp_path: Path, name: str) -> None:
    folder = save_model(tmp_path, small_config("llama"))
    assert outcomes(folder / name, folder, mutate_json)["refused"]
