"""The compiled pass: the same on any number of threads and for any processor, and never needed."""

import platform
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny_models import (
    decode_alone,
    load_engine,
    random_tokens,
    round_weights,
    rows_that_differ,
    save_model,
    save_output_head,
    small_config,
)
from tiny_pair import tiny_config

from specpool.engine.cache.spans import Span
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native import compiler, panels
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.passes.native.panels import BFLOAT16, FLOAT32, Segment

pytestmark = [pytest.mark.cpus, pytest.mark.thorough]


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Of the weights."""
    name: str = request.param
    return name


@pytest.mark.parametrize("processor", ["-march=x86-64-v3", "-march=x86-64"])
def test_other_processors_get_other_vectors_and_results_as_exact(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, processor: str, dtype: str
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("flags of another kind of processor")
    here = load_engine(tiny_pair[0], dtype=dtype)
    monkeypatch.setitem(compiler.NATIVE, "x86_64", processor)
    there = load_engine(tiny_pair[0], dtype=dtype)
    assert isinstance(there.forward_pass, NativeModel)
    tokens = random_tokens(80)
    torch.testing.assert_close(decode_alone(there, tokens), decode_alone(here, tokens), atol=1e-4, rtol=1e-4)
    assert there.bitwise
    assert rows_that_differ(there) == 0


def test_the_number_of_threads_changes_no_bit(tiny_pair: tuple[Path, Path], dtype: str) -> None:
    engine, tokens = load_engine(tiny_pair[0], dtype=dtype), random_tokens(200)
    before = torch.get_num_threads()
    logits = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            first = engine.forward([Span(1, 0, tokens[:170], 20), Span(2, 0, tokens[:3], 1)])
            logits.append(torch.cat([first, engine.forward([Span(1, 170, tokens[170:], 30)])]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(logits[0], others) for others in logits[1:])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 1, 16), (14, 2, 64), (32, 2, 16), (4, 4, 128), (6, 2, 80), (5, 1, 96)],
)
def test_heads_of_any_size_and_grouping(tmp_path: Path, heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    folder = round_weights(save_model(tmp_path, tiny_config(hidden_size=16 * heads, num_hidden_layers=2, **shape)))
    compiled, fused = load_engine(folder, dtype=dtype), load_engine(folder, native=False)
    assert isinstance(compiled.forward_pass, NativeModel)
    tokens = random_tokens(70)
    torch.testing.assert_close(decode_alone(compiled, tokens), decode_alone(fused, tokens), atol=1e-4, rtol=1e-4)
    assert rows_that_differ(compiled) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_bfloat16_give_what_they_give_in_float32(tmp_path: Path, tied: bool) -> None:
    """Bit for bit: nothing that is computed is rounded. So they are kept so wherever it loses nothing."""
    folder = round_weights(save_model(tmp_path, tiny_config(tie_word_embeddings=tied)))
    half, tokens = load_engine(folder), random_tokens(300)
    with mock.patch.object(panels, "_segment", side_effect=lambda weight: Segment(FLOAT32, weight)):
        whole = load_engine(folder)
    spans = [Span(2, 0, tokens, 40), Span(5, 0, tokens[:1], 1)]
    assert torch.equal(half.forward(spans), whole.forward(spans))
    assert isinstance(half.forward_pass, NativeModel)
    assert isinstance(whole.forward_pass, NativeModel)
    halves = half.forward_pass.kinds[BFLOAT16]
    assert (half.forward_pass.kinds, whole.forward_pass.kinds) == ({BFLOAT16: halves}, {FLOAT32: 2 * halves})
    assert whole.info().weight_bytes - half.info().weight_bytes == halves
    assert half.info().kv_bytes_per_token == whole.info().kv_bytes_per_token
    assert half.info().kv_bytes_total == sum(
        cache.nbytes for cache in (*half.layout.arena.keys, *half.layout.arena.values)
    )


def test_a_head_of_some_tokens_is_kept_as_bfloat16_too(tmp_path: Path) -> None:
    folder, tokens, kept = round_weights(save_model(tmp_path, tiny_config())), random_tokens(30), [3, 200, 7, 255, 90]
    whole = load_engine(folder, dtype="bfloat16").forward([Span(0, 0, tokens, 30)])
    save_output_head(folder, kept)
    engine = load_engine(folder, dtype="bfloat16")
    assert isinstance(engine.forward_pass, NativeModel)
    assert rows_that_differ(engine) == 0
    assert torch.equal(engine.forward([Span(0, 0, tokens, 30)]), whole[:, kept])


@pytest.mark.real_pair
@pytest.mark.parametrize("model", ["target", "draft"])
def test_real_weights_of_bfloat16_give_nearly_the_librarys_own_logits(model: str) -> None:
    """Else the engine would refuse them: the library computes in bfloat16 too."""
    engine = load_engine(getattr(embedded_pair(), model), dtype="bfloat16", max_model_len=400)
    assert isinstance(engine.forward_pass, NativeModel)
    assert engine.bitwise


def test_large_numbers_neither_overflow_nor_lose_their_order(tmp_path: Path) -> None:
    """Scores and gates far beyond what an exponential can hold."""
    folder = save_model(tmp_path, small_config("llama"), weight=4.0)
    compiled, fused = load_engine(folder), load_engine(folder, native=False)
    tokens = random_tokens(60)
    own, other = decode_alone(compiled, tokens), decode_alone(fused, tokens)
    assert torch.isfinite(own).all()
    torch.testing.assert_close(own, other, atol=1e-3 * float(other.abs().max()), rtol=1e-2)


def test_columns_beyond_what_was_ever_written_are_not_read(tiny_pair: tuple[Path, Path]) -> None:
    engine, tokens = load_engine(tiny_pair[0]), random_tokens(37)
    logits = engine.forward([Span(7, 0, tokens, 5)])
    first = engine.layout.origin(7)
    for tensor in (*engine.layout.arena.keys, *engine.layout.arena.values):
        tensor[:, :first] = tensor[:, first + 37 :] = torch.nan
    assert torch.equal(engine.forward([Span(7, 0, tokens, 5)]), logits)


def test_measured_passes_are_the_same_and_say_where_their_time_went(tiny_pair: tuple[Path, Path]) -> None:
    engine, tokens = load_engine(tiny_pair[0]), random_tokens(50)
    assert isinstance(engine.forward_pass, NativeModel)
    logits = engine.forward([Span(1, 0, tokens, 5)])
    with engine.forward_pass.measured() as seconds:
        assert torch.equal(engine.forward([Span(1, 0, tokens, 5)]), logits)
    assert set(seconds) == {"products", "attention", "rows and cache"}
    assert all(spent > 0 for spent in seconds.values())
    with engine.forward_pass.measured() as again:
        pass
    assert set(again.values()) == {0.0}


# --- Where it cannot be had


def assert_done_without(folder: Path, **options: object) -> None:
    engine = load_engine(folder, **options)
    assert not isinstance(engine.forward_pass, NativeModel)
    assert engine.bitwise


def test_without_a_compiler_torch_does_it(tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert_done_without(tiny_pair[0])


def test_a_compiler_that_fails_is_reported(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "FLAGS", ("--no-such-flag",))
    assert_done_without(tiny_pair[0])
    assert "could not be compiled" in caplog.text
    assert "no-such-flag" in caplog.text


def test_a_file_that_is_no_library_is_reported(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "true")
    assert_done_without(tiny_pair[0])
    assert "could not be compiled" in caplog.text


@pytest.mark.parametrize("sizes", [{"head_dim": 24}, {"hidden_size": 40}, {"intermediate_size": 100}])
def test_sizes_that_are_no_whole_vectors_are_left_to_torch(tmp_path: Path, sizes: dict[str, int]) -> None:
    assert_done_without(save_model(tmp_path, small_config("llama", **sizes)))


def test_float16_is_left_to_torch(tiny_pair: tuple[Path, Path]) -> None:
    assert isinstance(load_engine(tiny_pair[0], dtype="float16").forward_pass, FusedModel)


def test_bfloat16_without_a_compiler_is_computed_and_cached_as_such(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    engine = load_engine(tiny_pair[0], dtype="bfloat16")
    assert isinstance(engine.forward_pass, FusedModel)
    assert engine.layout.arena.keys[0].dtype == torch.bfloat16
    assert engine.info().kv_bytes_per_token == 2 * 3 * 2 * 16 * 2


def test_it_can_be_switched_off(tiny_pair: tuple[Path, Path]) -> None:
    assert_done_without(tiny_pair[0], native=False)
