"""The shipped form of a trained draft, and the pair that is made with one."""

import shutil
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import load_engine
from transformers import AutoModelForCausalLM

from specpool.distill.student import Student
from specpool.engine.models import embedded_pair
from specpool.engine.models.compact import LARGEST, load_compact, load_trained, save_compact
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.weights.kinds import INT8
from specpool.engine.weights.quantized import Quantized

ROOT = Path(__file__).parents[4]


def random_trained(target: Path, rows: int = 100) -> dict[str, torch.Tensor]:
    """What training of a draft of two layers could have ended with."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return Student(model, [0, 2], torch.arange(rows)).trained()


@given(seed=st.integers(0, 2**16), exponents=st.lists(st.integers(-30, 30), min_size=1, max_size=5))
def test_weights_come_back_within_half_a_step_of_their_row(
    tmp_path_factory: pytest.TempPathFactory, seed: int, exponents: list[int]
) -> None:
    file = tmp_path_factory.mktemp("compact") / "draft.safetensors"
    weight = torch.randn(len(exponents), 33, generator=torch.Generator().manual_seed(seed))
    weight *= 2.0 ** torch.tensor(exponents)[:, None]
    save_compact(file, {"weight": weight})
    again = load_trained(file)["weight"]
    step = weight.abs().amax(1, keepdim=True) / LARGEST
    assert ((again - weight).abs() <= 0.501 * step).all()
    kept = load_compact(file)["weight"]
    assert isinstance(kept, Quantized)
    assert kept.kind is INT8
    assert torch.equal(kept.dequantized(), again)


def test_what_is_no_matrix_is_kept_and_zeros_stay_zeros(tmp_path: Path) -> None:
    norm, ids = torch.randn(7), torch.tensor([3, 70_000], dtype=torch.int32)
    save_compact(tmp_path / "draft", {"norm": norm, "output_ids": ids, "zeros": torch.zeros(2, 3)})
    again = load_trained(tmp_path / "draft")
    assert torch.equal(again["norm"], norm.bfloat16().float())
    assert torch.equal(again["output_ids"], ids)
    assert torch.equal(again["zeros"], torch.zeros(2, 3))


def test_a_weight_takes_a_byte(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    trained = random_trained(tiny_pair[0])
    save_compact(tmp_path / "draft", trained)
    stored = load_file(tmp_path / "draft")
    matrices = {name for name, weight in trained.items() if weight.dim() == 2}
    assert {name for name, weight in stored.items() if weight.dtype == torch.int8} == matrices
    assert load_compact(tmp_path / "draft").keys() == trained.keys()


def test_the_pair_is_made_of_the_target_and_the_shipped_draft(
    tmp_path: Path, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = random_trained(tiny_pair[0])
    save_compact(tmp_path / "draft.safetensors", trained)
    monkeypatch.setattr(embedded_pair, "DRAFT", tmp_path / "draft.safetensors")
    monkeypatch.setattr(embedded_pair, "_fetch", lambda folder: tiny_pair[0])
    monkeypatch.setattr(embedded_pair, "_describe", shutil.copytree)
    for name in (*embedded_pair.OLDER, "smollm2-135m-30"):
        (tmp_path / "cache" / name / "target").mkdir(parents=True)
    assert embedded_pair.existing_pair(tmp_path / "cache") is None
    pair = embedded_pair.embedded_pair(tmp_path / "cache")
    assert embedded_pair.existing_pair(tmp_path / "cache") == pair
    assert embedded_pair.embedded_pair(tmp_path / "cache") == pair
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert left == {embedded_pair.FOLDER, "smollm2-135m-30"}, "only pairs of older versions are removed"
    draft = load_engine(pair.draft)
    assert draft.bitwise
    assert draft.loaded.output_ids is not None
    assert draft.loaded.output_ids.tolist() == trained["output_ids"].tolist()
    # As they were shipped, so that a step reads a byte for each weight.
    assert isinstance(draft.forward_pass, NativeModel)
    assert draft.forward_pass.kinds.keys() == {"INT8", "BFLOAT16"}
    stored = load_file(pair.draft / "model.safetensors")
    matrices = {name for name, weight in stored.items() if weight.dim() == 2}
    assert {weight.dtype for weight in stored.values()} == {torch.uint8, torch.bfloat16}
    assert [name for name in matrices if not name.endswith(".INT8")] == ["model.embed_tokens.weight"]
    name, shipped = "layers.1.mlp.down_proj.weight", load_compact(embedded_pair.DRAFT)
    kept = shipped[f"body.{name}"]
    assert isinstance(kept, Quantized)
    assert torch.equal(stored[f"model.{name}.INT8"], kept.data)


def test_an_interrupted_set_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(gguf: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded_pair, "_fetch", lambda folder: folder)
    monkeypatch.setattr(embedded_pair, "_describe", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embedded_pair.embedded_pair(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_holds_the_draft_and_its_card() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "engine*" in setuptools["packages"]["find"]["include"]
    for file in (embedded_pair.DRAFT, embedded_pair.DRAFT.with_suffix(".md")):
        assert any(fnmatch(file.name, pattern) for pattern in setuptools["package-data"]["*"])


@pytest.mark.real_pair
def test_the_shipped_draft_loads_with_its_own_head_in_int8() -> None:
    draft = load_engine(embedded_pair.embedded_pair().draft, max_model_len=400)
    assert draft.bitwise
    assert draft.loaded.output_ids is not None
    assert isinstance(draft.forward_pass, NativeModel)
    assert draft.forward_pass.kinds.keys() == {"INT8", "Q8_0"}, "those of the target's embeddings too"
