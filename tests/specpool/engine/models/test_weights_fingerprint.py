"""Fingerprints are equal for equal weights and results, and change with any bit."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import edited_weights, load_engine, random_tokens, save_output_head
from torch import nn
from transformers import AutoModelForCausalLM

from specpool.engine.cache.spans import Span
from specpool.engine.config.options import Dtype, EngineOptions
from specpool.engine.models.facts import weights_fingerprint
from specpool.engine.models.loading import LoadedModel, load_model
from specpool.engine.startup.self_test import numerics_fingerprint


@pytest.fixture(scope="module")
def loaded(tiny_pair: tuple[Path, Path]) -> LoadedModel:
    return load_model(EngineOptions(model=str(tiny_pair[0]), device="cpu"))


def fingerprint_of(folder: Path, dtype: Dtype = "auto") -> str:
    return weights_fingerprint(load_model(EngineOptions(model=str(folder), device="cpu", dtype=dtype)))


def test_fingerprint_ignores_the_number_of_files(
    tiny_pair: tuple[Path, Path], loaded: LoadedModel, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_pair[0], tmp_path / "shards")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tiny_pair[0]).save_pretrained(folder, max_shard_size="200KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    assert fingerprint_of(folder) == weights_fingerprint(loaded)


def test_fingerprint_depends_on_dtype_weights_and_head(
    tiny_pair: tuple[Path, Path], loaded: LoadedModel, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_pair[0], tmp_path / "head")
    fingerprints = {weights_fingerprint(loaded), fingerprint_of(tiny_pair[1]), fingerprint_of(tiny_pair[0], "bfloat16")}
    rows = load_file(folder / "model.safetensors")["lm_head.weight"][[3, 9]]
    for output_ids in ([3, 9], [3, 10]):
        save_output_head(folder, output_ids, rows)
        fingerprints.add(fingerprint_of(folder))
    assert len(fingerprints) == 5


def test_flipping_any_bit_changes_the_fingerprint(loaded: LoadedModel) -> None:
    fingerprints = {weights_fingerprint(loaded)}
    for number, weight in enumerate(loaded.model.parameters()):
        bits = weight.detach().view(-1).view(torch.int32)
        place = number * 31 % len(bits)
        bits[place] ^= 1 << number % 32
        fingerprints.add(weights_fingerprint(loaded))
        bits[place] ^= 1 << number % 32
    assert len(fingerprints) == 1 + len([*loaded.model.parameters()])
    assert weights_fingerprint(loaded) in fingerprints


def test_swapping_weights_changes_the_fingerprint(loaded: LoadedModel) -> None:
    before = weights_fingerprint(loaded)
    first, second = (layer.mlp.gate_proj for layer in loaded.model.model.layers[:2])
    first.weight, second.weight = second.weight, first.weight
    assert weights_fingerprint(loaded) != before
    first.weight, second.weight = second.weight, first.weight


def test_fingerprint_includes_tied_weights_under_both_names(loaded: LoadedModel) -> None:
    untied = weights_fingerprint(loaded)
    head = loaded.model.lm_head.weight
    loaded.model.lm_head.weight = nn.Parameter(loaded.model.model.embed_tokens.weight.detach().clone())
    copied = weights_fingerprint(loaded)
    loaded.model.lm_head.weight = loaded.model.model.embed_tokens.weight
    assert untied != weights_fingerprint(loaded) == copied
    loaded.model.lm_head.weight = head


# --- Numerics


@pytest.mark.slow
def test_numerics_depend_on_the_pass_and_the_weights(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        compiled = [load_engine(tiny_pair[0], threads=count) for count in (1, 2, 3)]
    finally:
        torch.set_num_threads(threads)
    fused = [load_engine(tiny_pair[0], native=False) for _ in range(2)]
    folder = shutil.copytree(tiny_pair[0], tmp_path / "other")
    with edited_weights(folder) as weights:
        weights["model.layers.1.mlp.up_proj.weight"][7, 7] += 1e-3
    other, short = load_engine(folder), load_engine(tiny_pair[0], max_model_len=16)
    starts = [*compiled, *fused, other, short]
    assert all(engine.bitwise for engine in starts)
    assert all(engine.numerics_fingerprint and engine.weights_fingerprint for engine in starts)
    assert len({engine.numerics_fingerprint for engine in compiled}) == 1, "depends on threads"
    assert len({engine.numerics_fingerprint for engine in (compiled[0], *fused, other)}) == 3
    assert len({engine.weights_fingerprint for engine in (*compiled, *fused)}) == 1
    compiled[0].forward([Span(0, 0, random_tokens(100), 1)])
    assert numerics_fingerprint(compiled[0]) == compiled[0].info().numerics_fingerprint, "depends on the cache"


def test_numerics_without_batch_invariance_have_no_fingerprint(tiny_pair: tuple[Path, Path]) -> None:
    draft = load_engine(tiny_pair[1], exact=False)
    assert (draft.numerics_fingerprint, bool(draft.weights_fingerprint)) == ("", True)
