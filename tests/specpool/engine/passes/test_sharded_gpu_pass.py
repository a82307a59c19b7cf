"""The GPU pass of a sharded model, on interpreted kernels: whole sums match one device, parts add in rank order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted_kernels import FakeGraphs, imitate_kernels, split_k_gemm
from ranks_in_turns import GroupInTurns, run_ranks
from test_fused import save_random
from tiny_models import transformers_logits

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import load_model
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.gpu import attention
from specpool.engine.passes.gpu import gemm as gpu_gemm
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.gemm import Gemm, GemmBackend
from specpool.engine.passes.gpu.graphs import Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.passes.packing import Shape
from specpool.engine.probes import kernels
from specpool.engine.probes.kernels import choose_gemms
from specpool.engine.run.runner import PassRunner
from specpool.engine.sharding.shares import Sums

pytest.importorskip("triton")

TOKENS = [1, 5, 9, 60, 33]
MAX_LENGTH, PAGE_SIZE = 64, 16
ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 64}
# These weights use split-K, and more of it if chosen for the outputs of one rank alone.
SPLIT = {"hidden_size": 256, "intermediate_size": 512, **ONE_LAYER, "head_dim": 64}
BIASED = {"attention_bias": True, "mlp_bias": True}
UNEVEN = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, **ONE_LAYER}


def start(forward_pass: ForwardPass, kv_heads: int, head_dim: int) -> PassRunner:
    """A runner with two sequences, which take pages from the end of the cache."""
    model, groups = getattr(forward_pass, "model", forward_pass), 2
    layers, hidden_size = len(model.layers), model.norm.numel()
    columns, dtype, tables = 2 * MAX_LENGTH, forward_pass.compute_dtype, (2, MAX_LENGTH // PAGE_SIZE)
    arena = KVArena(layers, kv_heads, columns, head_dim, dtype, torch.device("cpu"), tables, PAGE_SIZE)
    pages = columns // PAGE_SIZE
    for slot in range(2):
        arena.assign(slot, 0, range(pages - slot - 1, -1, -2))
    runner = PassRunner(forward_pass, arena, Tiles(), groups, hidden_size)
    runner.capture_graphs(8, MAX_LENGTH, 1)
    return runner


def run(forward_pass: ForwardPass, kv_heads: int, head_dim: int) -> torch.Tensor:
    """Logits of a prompt in two passes, the second of which has another sequence with the same start."""
    runner = start(forward_pass, kv_heads, head_dim)
    first = runner.run([Span(0, 0, TOKENS[:3], 3)]).logits
    second = runner.run([Span(0, 3, TOKENS[3:], 2), Span(1, 0, TOKENS[:2], 2)]).logits
    return torch.cat([first, second])


def run_on_one_device(folder: Path) -> torch.Tensor:
    fused = FusedModel(load_model(EngineOptions(model=str(folder), device="cpu")).model)
    with torch.inference_mode():
        return run(GpuModel(fused, MAX_LENGTH), fused.kv_heads, fused.head_dim)


def run_shard(fused: FusedModel, group: GroupInTurns) -> torch.Tensor:
    return run(GpuModel(fused, MAX_LENGTH), fused.kv_heads, fused.head_dim)


VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "split-K": ("llama", 2, {**SPLIT, **BIASED}),
    "uneven shares": ("qwen3", 2, {**UNEVEN, "tie_word_embeddings": True}),
}


@pytest.fixture
def _split_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_gemm, "TARGET_PROGRAMS", 8)


@pytest.fixture
def _unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuModel, "padded_rows", lambda self, count: count)  # the interpreter is slow


@pytest.mark.usefixtures("_split_k", "_unpadded")
@pytest.mark.parametrize("name", VARIANTS)
def test_whole_sums_match_one_device_bit_for_bit(name: str, tmp_path: Path) -> None:
    architecture, ranks, changes = VARIANTS[name]
    folder = save_random(tmp_path, architecture, changes)
    expected = run_on_one_device(folder)
    for logits in run_ranks(folder, ranks, "whole", run_shard):
        assert torch.equal(logits, expected)


@pytest.mark.usefixtures("_unpadded")
@pytest.mark.parametrize(("architecture", "changes"), [("llama", {**UNEVEN, **BIASED}), ("glm4", ONE_LAYER)])
def test_partial_sums_agree_on_every_rank(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = save_random(tmp_path, architecture, changes)
    first, second = run_ranks(folder, 2, "parts", run_shard)
    assert torch.equal(second, first)
    expected = transformers_logits(folder, TOKENS)
    torch.testing.assert_close(first, torch.cat([expected, expected[:2]]), atol=1e-4, rtol=1e-3)
    assert torch.equal(first[5:], first[:2])


# --- GEMM backends


def chosen_backends(folder: Path, sums: Sums, preferred: GemmBackend | None = None) -> set[str]:
    def choose(fused: FusedModel, group: GroupInTurns) -> set[str]:
        model = GpuModel(fused, MAX_LENGTH)
        assert choose_gemms(model, 16, exact=True, preferred=preferred)
        assert not group.exchanged
        return {gemm.backends for gemm in model.gemms()}

    return set.union(*run_ranks(folder, 2, sums, choose))


def test_whole_sums_use_backends_with_the_bits_of_the_unsharded_weight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_random(tmp_path, "llama", ONE_LAYER)
    imitate_kernels(monkeypatch)
    monkeypatch.setattr(kernels, "_seconds_of", lambda gemms, backend, *_: 2.0 if backend == "cublas" else 3.0)
    exact = gpu_gemm.split_k_gemm
    monkeypatch.setattr(gpu_gemm, "cublas_gemm", lambda x, weight, split: exact(x.flip(-1), weight.flip(-1), split))
    assert chosen_backends(folder, "whole", preferred="cublas") == {"triton"}
    assert chosen_backends(folder, "parts", preferred="cublas") == {"cublas"}
    monkeypatch.setattr(gpu_gemm, "cublas_gemm", exact)
    assert chosen_backends(folder, "whole") == {"triton, cublas from 8 rows"}


def test_gemms_of_one_shape_are_proven_for_each_split_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS is batch-invariant for whole sums, such as the head's, but not for partial sums."""
    monkeypatch.setattr(gpu_gemm, "split_k_gemm", split_k_gemm)
    exact = gpu_gemm.split_k_gemm

    def cublas(x: torch.Tensor, weight: torch.Tensor, split_k: int) -> torch.Tensor:
        return exact(x, weight, split_k) + (len(x) if split_k > 1 else 0)

    monkeypatch.setattr(gpu_gemm, "cublas_gemm", cublas)
    gemms = [Gemm(torch.randn(64, 256), split=split) for split in (False, True)]
    assert [gemm.split_k for gemm in gemms] == [1, 2]
    group = SimpleNamespace(ranks=1, in_parts=False)
    model = SimpleNamespace(
        gemms=lambda: gemms, experts=list, head_gemms=list, group=group, padded_rows=lambda n: -(-n // 8) * 8
    )
    assert choose_gemms(model, 16, exact=True, preferred="cublas")  # type: ignore[arg-type]
    assert [gemm.backends for gemm in gemms] == ["cublas", "triton"]


def test_cublas_returns_the_partial_sums_of_split_k() -> None:
    """The next kernel adds them in order, so both backends can have the same bits."""
    gemm, x = Gemm(torch.randn(64, 256).half()), torch.randn(3, 256).half()
    assert gemm.split_k == 2
    gemm.cublas_rows = 3
    partials = gemm(x)
    assert partials.dtype == torch.float32
    for half, partial in zip((slice(128), slice(128, 256)), partials, strict=True):
        torch.testing.assert_close(partial, x[:, half].float() @ gemm.weight[:, half].float().T)


# --- CUDA graphs


@pytest.mark.parametrize("sums", ["whole", "parts"])
def test_all_ranks_capture_the_same_passes(sums: Sums, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imitate_kernels(monkeypatch)
    folder = save_random(tmp_path, "llama", {**UNEVEN, **BIASED})

    def capture(fused: FusedModel, group: GroupInTurns) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        kv_heads, head_dim, fake_graphs = fused.kv_heads, fused.head_dim, FakeGraphs()
        model = GpuModel(fused, MAX_LENGTH)
        eager = run(model, kv_heads, head_dim)
        forward_pass = CapturedModel(model, fake_graphs)
        logits = run(forward_pass, kv_heads, head_dim)
        assert forward_pass.draft_loop(None, lambda rows: rows) is None  # type: ignore[arg-type]
        (release,) = group._releases
        release()
        assert not forward_pass._graphs._graphs
        return logits, eager, fake_graphs.captured, fake_graphs.replayed

    (logits, eager, *counts), (others, _, *same) = run_ranks(folder, 2, sums, capture)
    assert torch.equal(logits, eager)
    assert torch.equal(others, eager)
    assert counts == same == [2, 2]


def test_the_graphs_of_ranks_record_any_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imitate_kernels(monkeypatch)
    folder = save_random(tmp_path, "llama", {**UNEVEN, "num_hidden_layers": 2})
    span = Span(0, 0, TOKENS, 1, num_states=len(TOKENS))

    def record(fused: FusedModel, group: GroupInTurns) -> tuple[list[torch.Tensor | None], int, int]:
        graphs = FakeGraphs()
        model, sizes = GpuModel(fused, MAX_LENGTH), (fused.kv_heads, fused.head_dim)
        runner = start(CapturedModel(model, graphs), *sizes)
        replayed = [runner.run([span], layers).states for layers in ((1, 2), (2,), (1,))]
        eager = start(model, *sizes).run([span], (1, 2)).states
        return [eager, *replayed], graphs.captured, graphs.replayed

    for (eager, *replayed), *counts in run_ranks(folder, 2, "parts", record):
        assert eager is not None
        first, second = eager.chunk(2, 1)
        assert all(map(torch.equal, replayed, (eager, second, first)))
        assert counts == [2, 3]


def test_no_rank_captures_what_fails_on_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imitate_kernels(monkeypatch)
    folder = save_random(tmp_path, "llama", UNEVEN)

    def refuse(run: Run) -> Any:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    def capture(fused: FusedModel, group: GroupInTurns) -> tuple[torch.Tensor, int, list[str]]:
        forward_pass = CapturedModel(GpuModel(fused, MAX_LENGTH), refuse if group.rank == 1 else FakeGraphs())
        logits = run(forward_pass, fused.kv_heads, fused.head_dim)
        return logits, forward_pass.num_graphs, forward_pass.notes

    (logits, *own), (others, *same) = run_ranks(folder, 2, "parts", capture)
    assert torch.equal(logits, others)
    note = "runs slowly: CUDA graph capture failed for 2 of 2 shapes, which run eagerly: "
    assert own == [0, [f"{note}it failed on another rank"]]
    assert same == [0, [f"{note}operation not permitted when stream is capturing"]]


def test_all_ranks_replay_passes_of_the_same_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, dim = save_random(tmp_path, "llama", UNEVEN), 16
    rows = tiles = 8
    # Enough for 2 splits of the larger shard, or 4 of the smaller one.
    monkeypatch.setattr(attention, "MAX_PARTIAL_BYTES", attention._partial_bytes(rows, 4, 2, dim))

    def lengths(fused: FusedModel, group: GroupInTurns) -> tuple[int, int]:
        assert fused.head_dim == dim
        model = GpuModel(fused, MAX_LENGTH)
        return model.heads, model.captured_length(Shape(rows, tiles, rows), 10**6)

    assert run_ranks(folder, 2, "parts", lengths) == [(4, 2 * attention.SPLIT), (2, 2 * attention.SPLIT)]


def test_exchanged_tensors_count_as_scratch(tmp_path: Path) -> None:
    folder = save_random(tmp_path, "llama", UNEVEN)

    def scratch(fused: FusedModel, group: GroupInTurns) -> int:
        return GpuModel(fused, MAX_LENGTH).scratch_bytes(100, MAX_LENGTH)

    assert run_ranks(folder, 2, "parts", scratch) == [3 * 2 * 100 * 96 * 4] * 2
    assert run_ranks(folder, 2, "whole", scratch) == [2 * 100 * 96 * 4] * 2
