"""The GPU's pass of a divided model on a CPU, by interpreted kernels: the bits of one device, or sums in rank order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_kernels import Recorder, imitate_kernels
from ranks_in_turns import GroupInTurns, run_ranks
from test_fused import save_random
from tiny_models import transformers_logits

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Location, Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import load_model
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.gpu import gemm as gpu_products
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.gemm import Product
from specpool.engine.passes.gpu.model import GpuModel, try_kernels
from specpool.engine.probes import kernels
from specpool.engine.probes.kernels import choose_products
from specpool.engine.run.runner import PassRunner
from specpool.engine.sharding.shares import Sums

pytest.importorskip("triton")

TOKENS = [1, 5, 9, 60, 33]
LONGEST = 64
ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 64}
# Products of these have parts, and more parts where they are divided by the outputs of a rank alone.
SPLIT = {"hidden_size": 256, "intermediate_size": 512, **ONE_LAYER, "head_dim": 64}
BIASED = {"attention_bias": True, "mlp_bias": True}
UNEVEN = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, **ONE_LAYER}


def run(forward_pass: ForwardPass, kv_heads: int, head_dim: int, repeats: int = 1) -> torch.Tensor:
    """Logits of a prompt in two passes, the second one beside another sequence that begins alike."""
    layers, groups = len(getattr(forward_pass, "model", forward_pass).layers), 2
    arena = KVArena(layers, kv_heads, 2 * LONGEST, head_dim, forward_pass.compute_dtype, torch.device("cpu"))
    runner = PassRunner(forward_pass, arena, Tiles(), groups)
    places = [Location(LONGEST), Location(0)]
    for _ in range(repeats):
        found = [runner.run([Span(0, 0, TOKENS[:3], 3)], places[:1])]
        found.append(runner.run([Span(0, 3, TOKENS[3:], 2), Span(1, 0, TOKENS[:2], 2)], places))
    return torch.cat(found)


def alone(folder: Path) -> torch.Tensor:
    fused = FusedModel(load_model(EngineOptions(model=str(folder), device="cpu")).model)
    with torch.inference_mode():
        return run(GpuModel(fused, LONGEST), fused.kv_heads, fused.head_dim)


def of_kernels(fused: FusedModel, group: GroupInTurns) -> torch.Tensor:
    return run(GpuModel(fused, LONGEST), fused.kv_heads, fused.head_dim)


VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "split products": ("llama", 2, {**SPLIT, **BIASED}),
    "uneven shares": ("qwen3", 2, {**UNEVEN, "tie_word_embeddings": True}),
}


@pytest.fixture
def _split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_products, "PROGRAMS", 8)


@pytest.fixture
def _unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuModel, "padded_rows", lambda self, count: count)  # the interpreter is slow


@pytest.mark.usefixtures("_split", "_unpadded")
@pytest.mark.parametrize("name", VARIANTS)
def test_whole_sums_have_the_bits_of_one_device(name: str, tmp_path: Path) -> None:
    architecture, ranks, changes = VARIANTS[name]
    folder = save_random(tmp_path, architecture, changes)
    expected = alone(folder)
    for logits in run_ranks(folder, ranks, "whole", of_kernels):
        assert torch.equal(logits, expected)


@pytest.mark.usefixtures("_unpadded")
@pytest.mark.parametrize(("architecture", "changes"), [("llama", {**UNEVEN, **BIASED}), ("glm4", ONE_LAYER)])
def test_sums_in_parts_are_the_same_on_every_rank(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = save_random(tmp_path, architecture, changes)
    first, second = run_ranks(folder, 2, "parts", of_kernels)
    assert torch.equal(second, first)
    expected = transformers_logits(folder, TOKENS)
    torch.testing.assert_close(first, torch.cat([expected, expected[:2]]), atol=1e-4, rtol=1e-3)
    assert torch.equal(first[5:], first[:2])


def test_all_ranks_try_their_kernels_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imitate_kernels(monkeypatch)

    def tried(fused: FusedModel, group: GroupInTurns) -> list[tuple[int, ...]]:
        try_kernels(fused)
        return group.exchanged

    shapes = run_ranks(save_random(tmp_path, "llama", UNEVEN), 2, "parts", tried)
    assert shapes == [[(1, 96), (1, 1, 96), (1, 1, 96)]] * 2


def test_terms_are_in_the_order_of_the_ranks_and_take_one_exchange(tmp_path: Path) -> None:
    folder = save_random(tmp_path, "llama", {**UNEVEN, **BIASED})
    x = torch.randn(3, 80)

    def terms(fused: FusedModel, group: GroupInTurns) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        layer = GpuModel(fused, LONGEST).layers[0]
        own = x[:, : group.local_size("attended")]
        added = layer._addend(layer.out, own, "attended", layer.out_bias, None)
        assert group.exchanged == [(1, 3, 96)]
        assert added.bias is None
        return added.parts, layer.out(own)[0], layer.out_bias

    (parts, first, bias), (same, second, none) = run_ranks(folder, 2, "parts", terms)
    assert none is None
    assert bias is not None
    assert torch.equal(parts, torch.stack([first + bias, second]))
    assert torch.equal(parts, same)


# --- Products


@pytest.mark.usefixtures("_split")
@pytest.mark.parametrize(("sums", "expected"), [("whole", [1, 2, 1, 2]), ("parts", [2, 1, 1, 1])])
def test_whole_sums_have_the_parts_of_the_whole_weight(sums: Sums, expected: list[int], tmp_path: Path) -> None:
    folder = save_random(tmp_path, "llama", {**SPLIT})

    def parts(fused: FusedModel, group: GroupInTurns) -> list[int]:
        layer = GpuModel(fused, LONGEST).layers[0]
        return [its.parts for its in (layer.qkv, layer.out, layer.gate_up, layer.down)]

    assert run_ranks(folder, 2, sums, parts) == [expected] * 2


def chosen(folder: Path, sums: Sums, wanted: gpu_products.Kind | None = None) -> set[str]:
    def choose(fused: FusedModel, group: GroupInTurns) -> set[str]:
        model = GpuModel(fused, LONGEST)
        assert choose_products(model, 16, exact=True, wanted=wanted)
        assert not group.exchanged
        return {product.kind for product in model.products()}

    return set.union(*run_ranks(folder, 2, sums, choose))


def test_whole_sums_are_by_products_with_the_bits_of_the_whole_weight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_random(tmp_path, "llama", ONE_LAYER)
    imitate_kernels(monkeypatch)
    monkeypatch.setattr(kernels, "_log_times", lambda products, kind, *_: 2.0 if kind == "cublas" else 3.0)
    exact = gpu_products.multiply
    monkeypatch.setattr(gpu_products, "linear", lambda x, weight: exact(x.flip(-1), weight.flip(-1), 1)[0])
    assert chosen(folder, "whole", wanted="cublas") == {"triton"}
    assert chosen(folder, "parts", wanted="cublas") == {"cublas"}
    monkeypatch.setattr(gpu_products, "linear", lambda x, weight: exact(x, weight, 1)[0])
    assert chosen(folder, "whole") == {"cublas"}


def test_kinds_of_products_with_parts_are_never_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel after them adds up the parts, and rounds nothing before it goes on."""
    product = Product(torch.randn(64, 256).half())
    assert product.parts == 2
    results = {kind: kernels._if_exact(product, kind, [8, 16]) for kind in gpu_products.KINDS}
    assert results["triton"] is not None
    assert results["triton"] != results["cublas"]


# --- Recorded passes


@pytest.mark.parametrize("sums", ["whole", "parts"])
def test_all_ranks_record_the_same_passes(sums: Sums, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imitate_kernels(monkeypatch)
    folder = save_random(tmp_path, "llama", {**UNEVEN, **BIASED})

    def recorded(fused: FusedModel, group: GroupInTurns) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        kv_heads, head_dim, recorder = fused.kv_heads, fused.head_dim, Recorder()
        model = GpuModel(fused, LONGEST)
        launched = run(model, kv_heads, head_dim)
        forward_pass = CapturedModel(model, recorder)
        logits = run(forward_pass, kv_heads, head_dim, repeats=4)
        assert forward_pass.draft_loop(None, lambda rows: rows) is None  # type: ignore[arg-type]
        (release,) = group._releases
        release()
        assert not forward_pass._recordings._kept
        return logits, launched, recorder.recorded, recorder.replayed

    (logits, launched, *counts), (others, _, *same) = run_ranks(folder, 2, sums, recorded)
    assert torch.equal(logits, launched)
    assert torch.equal(others, launched)
    assert counts == same == [1, 7]


def test_a_rank_that_cannot_record_does_not_go_on_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imitate_kernels(monkeypatch)
    folder = save_random(tmp_path, "llama", UNEVEN)

    def refuse(*_: object) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    def recorded(fused: FusedModel, group: GroupInTurns) -> str:
        forward_pass = CapturedModel(GpuModel(fused, LONGEST), refuse)
        with pytest.raises(RuntimeError) as caught:
            run(forward_pass, fused.kv_heads, fused.head_dim, repeats=2)
        return str(caught.value)

    for message in run_ranks(folder, 2, "parts", recorded):
        assert message.startswith("passes cannot be recorded; cuda_graphs=false launches them: operation not permitted")


def test_what_ranks_exchange_counts_as_memory(tmp_path: Path) -> None:
    folder = save_random(tmp_path, "llama", UNEVEN)

    def scratch(fused: FusedModel, group: GroupInTurns) -> int:
        return GpuModel(fused, LONGEST).scratch_bytes(100, LONGEST)

    assert run_ranks(folder, 2, "parts", scratch) == [3 * 2 * 100 * 96 * 4] * 2
    assert run_ranks(folder, 2, "whole", scratch) == [2 * 100 * 96 * 4] * 2
