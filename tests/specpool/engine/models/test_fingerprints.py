"""Fingerprints: equal for equal weights and results, and different as soon as one bit is."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import random_rows
from safetensors.torch import load_file, save_file
from tiny_models import load_engine, random_tokens, save_output_head
from torch import nn
from transformers import AutoModelForCausalLM

from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.fingerprints import weights_fingerprint
from specpool.engine.models.loading import LoadedModel, load_model
from specpool.engine.startup.numerics_fingerprint import numerics_fingerprint
from specpool.engine.weights import checksums as words
from specpool.engine.weights.checksums import WORDS, word_sums
from specpool.engine.weights.kinds import KINDS
from specpool.engine.weights.quantized import Quantized

ONE_ROW, MORE = WORDS, 5 * WORDS + 77


@pytest.fixture(scope="module")
def loaded(tiny_pair: tuple[Path, Path]) -> LoadedModel:
    return load_model(EngineOptions(model=str(tiny_pair[0]), device="cpu"))


def test_weights_are_the_same_however_they_are_split_into_files(
    tiny_pair: tuple[Path, Path], loaded: LoadedModel, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_pair[0], tmp_path / "shards")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tiny_pair[0]).save_pretrained(folder, max_shard_size="200KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    assert weights_fingerprint(load_model(EngineOptions(model=str(folder), device="cpu"))) == weights_fingerprint(
        loaded
    )


def test_another_dtype_model_or_head_shows(tiny_pair: tuple[Path, Path], loaded: LoadedModel, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_pair[0], tmp_path / "head")
    found = {weights_fingerprint(loaded)}
    found.add(weights_fingerprint(load_model(EngineOptions(model=str(tiny_pair[1]), device="cpu"))))
    found.add(weights_fingerprint(load_model(EngineOptions(model=str(tiny_pair[0]), device="cpu", dtype="bfloat16"))))
    rows = load_file(folder / "model.safetensors")["lm_head.weight"][[3, 9]]
    for output_ids in ([3, 9], [3, 10]):
        save_output_head(folder, output_ids, rows)
        found.add(weights_fingerprint(load_model(EngineOptions(model=str(folder), device="cpu"))))
    assert len(found) == 5


def test_any_one_bit_of_any_weight_shows(loaded: LoadedModel) -> None:
    found = {weights_fingerprint(loaded)}
    for number, weight in enumerate(loaded.model.parameters()):
        bits = weight.detach().view(-1).view(torch.int32)
        place = number * 31 % len(bits)
        bits[place] ^= 1 << number % 32
        found.add(weights_fingerprint(loaded))
        bits[place] ^= 1 << number % 32
    assert len(found) == 1 + len([*loaded.model.parameters()])
    assert weights_fingerprint(loaded) in found


def test_weights_that_trade_places_show(loaded: LoadedModel) -> None:
    before = weights_fingerprint(loaded)
    first, second = (layer.mlp.gate_proj for layer in loaded.model.model.layers[:2])
    first.weight, second.weight = second.weight, first.weight
    assert weights_fingerprint(loaded) != before
    first.weight, second.weight = second.weight, first.weight


def _flip_two_signs(words: torch.Tensor) -> None:
    words[[1, 2]] ^= -(2**31)


def _swap(words: torch.Tensor) -> None:
    words[[3, 4]] = words[[4, 3]]


def _swap_far(words: torch.Tensor) -> None:
    words[[0, -1]] = words[[-1, 0]]


def _turn(words: torch.Tensor) -> None:
    words.copy_(words.roll(1))


def _zero_the_end(words: torch.Tensor) -> None:
    words[-1] = 0


@pytest.mark.parametrize("change", [_flip_two_signs, _swap, _swap_far, _turn, _zero_the_end])
@pytest.mark.parametrize("size", [6, ONE_ROW, MORE])
def test_changes_that_a_plain_sum_would_miss_show(size: int, change: Callable[[torch.Tensor], None]) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0))
    changed = weight.clone()
    change(changed.view(torch.int32))
    assert not torch.equal(weight, changed)
    assert word_sums(weight) != word_sums(changed)


@pytest.mark.parametrize("size", [1, 3, WORDS - 1, 2 * WORDS + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.int64])
def test_the_bits_count_and_not_how_they_lie_in_memory(size: int, dtype: torch.dtype) -> None:
    weight = torch.arange(size).to(dtype)
    strided = torch.stack([weight, weight], 1)[:, 0]
    behind = torch.cat([weight[:1], weight])[1:]
    assert word_sums(weight) == word_sums(strided) == word_sums(behind)


@pytest.mark.parametrize(("rows", "columns"), [(1500, 96), (4096, 32), (5, 64)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_sums_of_parts_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(words, "AT_A_TIME", 1)
    weight = Quantized(KINDS["Q8_0"], torch.from_numpy(random_rows("Q8_0", rows, columns)))
    whole = weight.dequantized()
    assert word_sums(weight, dtype) == word_sums(whole, dtype) == word_sums(whole if dtype is None else whole.to(dtype))


def test_tied_weights_are_a_model_of_their_own(loaded: LoadedModel) -> None:
    """The output head is read twice, once under each name."""
    untied = weights_fingerprint(loaded)
    head = loaded.model.lm_head.weight
    loaded.model.lm_head.weight = nn.Parameter(loaded.model.model.embed_tokens.weight.detach().clone())
    copied = weights_fingerprint(loaded)
    loaded.model.lm_head.weight = loaded.model.model.embed_tokens.weight
    assert untied != weights_fingerprint(loaded) == copied
    loaded.model.lm_head.weight = head


# --- Numerics


@pytest.mark.parametrize("native", [True, False], ids=["compiled", "torch"])
def test_two_starts_compute_the_same(tiny_pair: tuple[Path, Path], native: bool) -> None:
    first, second = (load_engine(tiny_pair[0], native=native) for _ in range(2))
    assert first.bitwise
    assert first.numerics_fingerprint == second.numerics_fingerprint != ""
    assert first.weights_fingerprint == second.weights_fingerprint != ""
    assert first.info().numerics_fingerprint == first.numerics_fingerprint


def test_threads_do_not_show_in_compiled_numerics(tiny_pair: tuple[Path, Path]) -> None:
    before = torch.get_num_threads()
    try:
        found = {load_engine(tiny_pair[0], threads=threads).numerics_fingerprint for threads in (1, 2, 3)}
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_another_pass_shows_in_the_numerics_and_not_in_the_weights(tiny_pair: tuple[Path, Path]) -> None:
    compiled, fused = (load_engine(tiny_pair[0], native=native) for native in (True, False))
    assert compiled.weights_fingerprint == fused.weights_fingerprint
    assert compiled.numerics_fingerprint != fused.numerics_fingerprint


def test_other_weights_show_in_the_numerics(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_pair[0], tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][7, 7] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    one, other = load_engine(tiny_pair[0]), load_engine(folder)
    assert one.numerics_fingerprint != other.numerics_fingerprint


def test_numerics_have_no_fingerprint_unless_they_are_the_same_in_every_batch(tiny_pair: tuple[Path, Path]) -> None:
    draft = load_engine(tiny_pair[1], exact=False)
    assert (draft.numerics_fingerprint, bool(draft.weights_fingerprint)) == ("", True)


def test_numerics_do_not_depend_on_what_the_cache_held(tiny_pair: tuple[Path, Path]) -> None:
    engine = load_engine(tiny_pair[0])
    engine.forward([Span(0, 0, random_tokens(100), 1)])
    assert numerics_fingerprint(engine) == engine.numerics_fingerprint


def test_a_short_model_has_numerics_too(loaded: LoadedModel, tiny_pair: tuple[Path, Path]) -> None:
    engine = load_engine(tiny_pair[0], max_model_len=16)
    assert engine.numerics_fingerprint
    assert dataclasses.replace(engine.info(), notes=()).max_model_len == 16
