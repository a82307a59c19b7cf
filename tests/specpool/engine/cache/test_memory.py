"""The KV cache fits into a memory limit, or the model is refused with the numbers."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import load_engine, refusal, save_model, small_config
from tiny_pair import tiny_config

from specpool.engine.cache import memory
from specpool.engine.cache.arena import KVArena
from specpool.engine.run import reservation


def test_too_small_kv_memory_is_refused_with_sizes(tiny_pair: tuple[Path, Path]) -> None:
    engine = load_engine(tiny_pair[0], max_sequences=1)
    needed = engine.info().kv_bytes_total
    columns, size = engine.layout.arena.columns, memory.readable(needed)
    assert refusal(tiny_pair[0], kv_memory=needed - 1) == (
        f"--kv-memory of {memory.readable(needed - 1)} is too small for a sequence of {columns} positions ({size}): "
        f"lower --max-model-len, or raise --kv-memory to {math.ceil(needed / 2**20)}MiB"
    )


def test_default_kv_memory_is_a_share_of_free_memory(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = load_engine(tiny_pair[0], max_sequences=1).info().kv_bytes_total
    free = SimpleNamespace(available=int(3.5 * one / memory.CPU_SHARE))
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)
    assert one <= load_engine(tiny_pair[0], max_sequences=4096).info().kv_bytes_total <= 3.5 * one
    assert "fewer than 4096 sequences of" in caplog.text
    assert load_engine(tiny_pair[0], max_sequences=5, kv_memory=5 * one).info().kv_bytes_total == 5 * one
    free.available = one
    assert "too small for a sequence" in refusal(tiny_pair[0])


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 40,960 positions."""
    return save_model(tmp_path_factory.mktemp("long"), tiny_config(max_position_embeddings=40_960))


def test_by_default_a_cache_has_room_for_one_long_or_many_short_sequences(
    long_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for sequences, positions in ((2, 40_960), (64, 64 * 2048)):
        engine = load_engine(long_model, max_sequences=sequences)
        assert (engine.max_model_len, engine.slots.tables.columns) == (40_960, positions)
    assert "--max-model-len 40960 (all positions of the model)" in caplog.text
    assert not [record for record in caplog.records if "not 64 sequences" in record.message]


def test_explicit_memory_is_used_up_to_full_sequences(long_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    position = load_engine(long_model, max_sequences=1).info().kv_bytes_per_token
    for positions, expected in ((100_000, 100_000), (200_000, 3 * 40_960)):
        engine = load_engine(long_model, max_sequences=3, kv_memory=positions * position)
        assert engine.slots.tables.columns == expected
    assert "sequences of" not in caplog.text
    load_engine(long_model, max_sequences=64, kv_memory=100_000 * position)
    assert "--kv-memory holds 100000 positions, fewer than 64 sequences of 2048 need" in caplog.text


def test_explicit_lengths_size_the_cache_for_full_sequences(long_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = load_engine(long_model, max_sequences=3, max_model_len=5_000)
    assert engine.slots.tables.columns == 3 * 5_024
    assert "--max-model-len 5000 (as set; the model has 40960)" in caplog.text


@pytest.mark.parametrize("option", ["kv_memory", "memory_budget", None])
def test_memory_limits_the_default_length(
    long_model: Path, option: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    whole = load_engine(long_model, max_sequences=1)
    others, kv = whole.footprint.weights + whole.footprint.activations, whole.footprint.kv // 40_960 * 10_000
    if option is None:
        free = SimpleNamespace(available=int(kv / memory.CPU_SHARE) + 1)
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)
    options = {"kv_memory": {"kv_memory": kv}, "memory_budget": {"memory_budget": others + kv}, None: {}}[option]
    engine = load_engine(long_model, max_sequences=2, **options)
    assert engine.max_model_len == engine.info().max_model_len == 9_728  # whole steps
    assert 9_728 <= engine.slots.tables.columns <= 10_000
    assert "--max-model-len 9728 (the model has 40960; limited by KV memory)" in caplog.text
    assert engine.slots.take(("test", 1), 9_728) is not None


def test_default_kv_memory_respects_container_limits(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", limit)
    limit.write_text("max\n")
    assert load_engine(tiny_pair[0], max_sequences=2).slots.total == 2
    limit.write_text(f"{2**20}\n")  # less than this process uses already
    assert "too small for a sequence" in refusal(tiny_pair[0])


@pytest.mark.slow
def test_memory_budget_covers_weights_activations_and_cache(tiny_pair: tuple[Path, Path]) -> None:
    options = {"native": False, "max_sequences": 4}
    footprint = load_engine(tiny_pair[0], **options).footprint
    one, others = footprint.kv // 4, footprint.weights + footprint.activations
    files = tiny_pair[0].glob("*.safetensors")
    stored = sum(weight.nbytes for file in files for weight in load_file(file).values())
    assert stored <= footprint.weights < 1.01 * stored  # rotary frequencies are not stored
    for room, expected in ((3, 3), (99, 4)):
        engine = load_engine(tiny_pair[0], **options, memory_budget=others + room * one)
        assert engine.footprint.kv == expected * one
    message = refusal(tiny_pair[0], **options, memory_budget=others + one - 1)
    for number in (others + one - 1, footprint.weights, footprint.activations, one):
        assert memory.readable(number) in message
    assert "raise --memory-budget" in message


def test_memory_limit_covers_the_process(tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_sequences": 4, "grammar_memory": 0}
    whole = load_engine(tiny_pair[0], **options).footprint
    one, present, peak = whole.kv // 4, 2**30, 2**30 + 1
    monkeypatch.setattr(reservation, "process_memory", lambda device: (present, peak))
    least = max(peak, present + whole.activations + one)
    for room, expected in ((2, 3), (99, 4)):
        engine = load_engine(tiny_pair[0], **options, memory_limit=least + room * one)
        assert engine.footprint.kv == expected * one
        assert engine.footprint.total == present + whole.activations + expected * one
    message = refusal(tiny_pair[0], **options, memory_limit=least - 1)
    assert message.startswith(f"--memory-limit of {memory.readable(least - 1)}, less ")
    assert f"raise --memory-limit to {math.ceil(least / 2**20)}MiB" in message
    peak = 2 * present  # loading took more than serving
    assert "raise --memory-limit to 2048MiB" in refusal(tiny_pair[0], **options, memory_limit=peak - 1)


def test_memory_limit_includes_compiled_grammars(tiny_pair: tuple[Path, Path]) -> None:
    for reserved, expected in ((0, 0), (2**25, 2**25), (None, 2**28)):
        footprint = load_engine(tiny_pair[0], max_sequences=4, memory_limit=2**34, grammar_memory=reserved).footprint
        assert expected <= footprint.grammars <= 1.1 * expected
        assert footprint.total <= 2**34
    with pytest.raises(ValueError, match="grammar_memory must be 0 or at least 32MiB"):
        load_engine(tiny_pair[0], grammar_memory=2**20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's peak")
def test_process_memory_knows_the_peak() -> None:
    size = 2**28
    before, _ = memory.process_memory(torch.device("cpu"))
    block = torch.ones(size, dtype=torch.uint8)
    with_block, _ = memory.process_memory(torch.device("cpu"))
    del block
    without, peak = memory.process_memory(torch.device("cpu"))
    assert with_block >= max(before, without) + size // 2
    assert peak >= with_block - 2**20  # the kernel counts in batches


def test_failed_allocations_are_reported(tmp_path: Path) -> None:
    positions = 2**31
    folder = save_model(tmp_path, tiny_config(max_position_embeddings=positions))
    message = refusal(folder, max_model_len=positions, max_sequences=1, kv_memory=10**18)
    assert f"KV cache of {memory.readable(768 * positions)} cannot" in message
    assert "cannot be allocated" in message


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("fused", [True, False])
def test_no_weight_file_stays_mapped(tmp_path: Path, fused: bool) -> None:
    engine = load_engine(save_model(tmp_path / "some-model", small_config("llama")), fused=fused)
    assert "some-model" not in Path("/proc/self/maps").read_text()
    assert engine.bitwise


def test_unused_positions_take_no_memory() -> None:
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    arena = KVArena(4, 4, 8 * 4096, 128, torch.bfloat16, torch.device("cpu"), (8, 256), 16)  # 512 MiB
    row = torch.ones(1, 4, 128, dtype=torch.bfloat16)
    arena.write(0, torch.tensor([20_487]), row, row)
    assert process.memory_info().rss - before < 64 * 2**20
    assert [keys.count_nonzero() for keys in arena.keys] == [row.numel(), 0, 0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux returns pages")
def test_a_cleared_arena_takes_no_memory() -> None:
    arena = KVArena(2, 2, 65_536, 64, torch.float32, torch.device("cpu"), (1, 4096), 16)  # 128 MiB
    for layer in (*arena.keys, *arena.values):
        layer.fill_(1.0)
    process = psutil.Process()
    full = process.memory_info().rss
    arena.clear()
    assert full - process.memory_info().rss > 120 * 2**20
    assert all(layer.isfinite().all() and not layer[:, 100].any() for layer in (*arena.keys, *arena.values))
