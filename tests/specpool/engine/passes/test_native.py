"""The compiled pass is batch-invariant on any processor and number of threads. Without it, torch takes over."""

import platform
from concurrent.futures import ThreadPoolExecutor
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
from specpool.engine.native import compiler
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native import decoder, panels
from specpool.engine.passes.native.model import STAGES, NativeModel
from specpool.engine.passes.native.panels import BFLOAT16, FLOAT32, Segment
from specpool.engine.run.engine import Engine

pytestmark = [pytest.mark.cpus, pytest.mark.thorough]
Pair = tuple[Path, Path]
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def native_pass(engine: Engine) -> NativeModel:
    assert isinstance(engine.forward_pass, NativeModel)
    return engine.forward_pass


@pytest.mark.parametrize(
    ("processor", "dtype"),
    [
        ("-march=x86-64", "float32"),
        pytest.param("-march=x86-64", "bfloat16", marks=pytest.mark.slow),
        pytest.param("-march=x86-64-v3", "float32", marks=pytest.mark.slow),
        pytest.param("-march=x86-64-v3", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_pass_is_batch_invariant_on_other_processors(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, processor: str, dtype: str
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("flags of another kind of processor")
    here = load_engine(tiny_pair[0], dtype=dtype)
    monkeypatch.setitem(compiler.NATIVE, "x86_64", processor)
    there = load_engine(tiny_pair[0], dtype=dtype)
    native_pass(there)
    tokens = random_tokens(80)
    torch.testing.assert_close(decode_alone(there, tokens), decode_alone(here, tokens), atol=1e-4, rtol=1e-4)
    assert there.bitwise
    assert rows_that_differ(there) == 0


@each_dtype
def test_thread_counts_change_no_bit(tiny_pair: Pair, dtype: str) -> None:
    engine, tokens = load_engine(tiny_pair[0], dtype=dtype), random_tokens(200)
    logits = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        first = engine.forward([Span(1, 0, tokens[:170], 20), Span(2, 0, tokens[:3], 1)])
        logits.append(torch.cat([first, engine.forward([Span(1, 170, tokens[170:], 30)])]))
    assert all(torch.equal(logits[0], others) for others in logits[1:])


LATE = {
    "before they claim work": ("if (!__atomic_compare_exchange_n(", "if (thread_number) usleep(20 * (left % 7)); "),
    "while they hold work": ("stage->work(stage, units - left", "if (thread_number) usleep(20 * (left % 7)); "),
    "before they start a stage": ("end_stage(stage);\n    start_stage", "if (thread_number) usleep(20); "),
}


@pytest.mark.parametrize("when", [pytest.param(when, marks=pytest.mark.slow) for when in LATE])
def test_threads_that_lose_their_core_change_no_bit(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    tokens = random_tokens(120)
    expected = decode_alone(load_engine(tiny_pair[0]), tokens)
    copies = tuple(tmp_path / source.name for source in decoder.SOURCES)
    for source, copy in zip(decoder.SOURCES, copies, strict=True):
        copy.write_text(source.read_text())
    place, delay = LATE[when]
    pool = (tmp_path / "pool.h").read_text()
    assert pool.count(place) == 1
    (tmp_path / "pool.h").write_text(pool.replace(place, delay + place))
    monkeypatch.setattr(decoder, "SOURCES", copies)
    late = load_engine(tiny_pair[0])
    for threads in (4, 2, 1, 4):
        torch.set_num_threads(threads)
        assert torch.equal(decode_alone(late, tokens), expected)


def test_models_that_run_at_the_same_time_share_the_threads(tiny_pair: Pair) -> None:
    """They have one library, and the pass that comes second runs on its own thread."""
    engines, tokens = [load_engine(tiny_pair[0]) for _ in range(2)], random_tokens(100)
    expected = decode_alone(engines[0], tokens)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            for logits in pool.map(decode_alone, engines, [tokens, tokens]):
                assert torch.equal(logits, expected)


@each_dtype
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 1, 16), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in (
        (14, 2, 64), (32, 2, 16), (4, 4, 128), (6, 2, 80), (5, 1, 96)))],
)  # fmt: skip
def test_any_head_size_and_grouping_works(tmp_path: Path, heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    folder = round_weights(save_model(tmp_path, tiny_config(hidden_size=16 * heads, num_hidden_layers=2, **shape)))
    compiled, fused = load_engine(folder, dtype=dtype), load_engine(folder, native=False)
    native_pass(compiled)
    tokens = random_tokens(70)
    torch.testing.assert_close(decode_alone(compiled, tokens), decode_alone(fused, tokens), atol=1e-4, rtol=1e-4)
    assert rows_that_differ(compiled) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_weights_match_float32_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    """Dequantization does not round, so weights are stored in bfloat16 wherever that is lossless."""
    folder = round_weights(save_model(tmp_path, tiny_config(tie_word_embeddings=tied)))
    half, tokens = load_engine(folder), random_tokens(300)
    with mock.patch.object(panels, "_segment", side_effect=lambda weight: Segment(FLOAT32, weight)):
        single = load_engine(folder)
    spans = [Span(2, 0, tokens, 40), Span(5, 0, tokens[:1], 1)]
    assert torch.equal(half.forward(spans), single.forward(spans))
    half_bytes = native_pass(half).kinds[BFLOAT16]
    assert (native_pass(half).kinds, native_pass(single).kinds) == ({BFLOAT16: half_bytes}, {FLOAT32: 2 * half_bytes})
    assert single.info().weight_bytes - half.info().weight_bytes == half_bytes
    assert half.info().kv_bytes_per_token == single.info().kv_bytes_per_token


def test_a_reduced_head_is_stored_in_bfloat16_too(tmp_path: Path) -> None:
    folder, tokens, output_ids = round_weights(save_model(tmp_path, tiny_config())), random_tokens(30), [3, 200, 7, 90]
    full = load_engine(folder, dtype="bfloat16").forward([Span(0, 0, tokens, 30)])
    save_output_head(folder, output_ids)
    engine = load_engine(folder, dtype="bfloat16")
    native_pass(engine)
    assert rows_that_differ(engine) == 0
    assert torch.equal(engine.forward([Span(0, 0, tokens, 30)]), full[:, output_ids])


@pytest.mark.slow
@pytest.mark.real_pair
def test_real_bfloat16_weights_pass_the_comparison_with_transformers() -> None:
    """Transformers computes in bfloat16. The engine rejects a model if its own logits differ too much."""
    engine = load_engine(embedded_pair().draft, dtype="bfloat16", max_model_len=400)
    native_pass(engine)
    assert engine.bitwise


def test_large_scores_and_gates_do_not_overflow(tmp_path: Path) -> None:
    folder = save_model(tmp_path, small_config("llama"), weight=4.0)
    compiled, fused = load_engine(folder), load_engine(folder, native=False)
    tokens = random_tokens(60)
    logits, expected = decode_alone(compiled, tokens), decode_alone(fused, tokens)
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits, expected, atol=1e-3 * float(expected.abs().max()), rtol=1e-2)


def test_unwritten_columns_are_not_read(tiny_pair: Pair) -> None:
    engine, tokens = load_engine(tiny_pair[0]), random_tokens(37)
    logits = engine.forward([Span(7, 0, tokens, 5)])
    arena = engine.layout.arena
    unwritten = torch.ones(arena.keys[0].shape[1], dtype=torch.bool)
    unwritten[arena.columns_of(7, 0, 37)] = False
    for tensor in (*arena.keys, *arena.values):
        tensor[:, unwritten] = torch.nan
    assert torch.equal(engine.forward([Span(7, 0, tokens, 5)]), logits)


def test_measured_passes_give_the_same_bits_and_the_seconds_of_stages(tiny_pair: Pair) -> None:
    engine, tokens = load_engine(tiny_pair[0]), random_tokens(50)
    logits = engine.forward([Span(1, 0, tokens, 5)])
    with native_pass(engine).measured() as seconds:
        assert torch.equal(engine.forward([Span(1, 0, tokens, 5)]), logits)
    assert set(seconds) == set(STAGES)
    assert all(spent > 0 for spent in seconds.values())
    with native_pass(engine).measured() as idle:
        pass
    assert set(idle.values()) == {0.0}


# --- Fallbacks


def assert_falls_back(folder: Path, **options: object) -> None:
    engine = load_engine(folder, **options)
    assert not isinstance(engine.forward_pass, NativeModel)
    assert engine.bitwise


@pytest.mark.parametrize(("compiler_name", "warning"), [("no-such-compiler", ""), ("true", "compiling the forward")])
def test_without_a_working_compiler_the_pass_runs_on_torch(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler_name: str, warning: str
) -> None:
    monkeypatch.setenv("CC", compiler_name)
    assert_falls_back(tiny_pair[0])
    assert warning in caplog.text


@pytest.mark.parametrize("options", [{"native": False}, {"dtype": "float16"}])
def test_options_can_require_torch(tiny_pair: Pair, options: dict[str, object]) -> None:
    assert isinstance(load_engine(tiny_pair[0], **options).forward_pass, FusedModel)


@pytest.mark.parametrize("sizes", [{"head_dim": 24}, {"hidden_size": 40}, {"intermediate_size": 100}])
def test_sizes_that_are_not_whole_vectors_run_on_torch(tmp_path: Path, sizes: dict[str, int]) -> None:
    assert_falls_back(save_model(tmp_path, small_config("llama", **sizes)))


def test_bfloat16_on_torch_has_a_bfloat16_cache(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    engine = load_engine(tiny_pair[0], dtype="bfloat16")
    assert isinstance(engine.forward_pass, FusedModel)
    assert engine.layout.arena.keys[0].dtype == torch.bfloat16
    assert engine.info().kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
