"""Latent attention on GPU kernels, in Triton's interpreter: near float64, and batch-invariant."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from interpreted_kernels import attended_row, check_against_transformers, imitate_graphs, load_by_kernels
from test_latent import VARIANTS, save_latent
from tiny_models import load_engine, random_tokens

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span
from specpool.engine.passes.gpu import attention
from specpool.engine.passes.gpu.attention import attend_pages, num_splits, rows_per_tile
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.head_gemm import HeadGemm
from specpool.engine.passes.kinds import FULL_ATTENTION
from specpool.engine.probes import kernels

pytest.importorskip("triton")

CPU = torch.device("cpu")
# The interpreter does not support bfloat16.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2}
RANK, ROTARY, SPLIT, PAGE, SLOTS = 20, 6, 64, 16, 3
LENGTH = SPLIT + 9

each_dtype = pytest.mark.parametrize("dtype", TOLERANCES)
each_limit = pytest.mark.parametrize(
    "limits", [{}, {"BUSY_PROGRAMS": 1}, {"MAX_PARTIAL_BYTES": 0}], ids=["a program per split", "one", "too many"]
)


def attend(query: torch.Tensor, arena: KVArena, tiles: Sequence[tuple[int, range]], length: int) -> torch.Tensor:
    """Attend from tiles, each a slot and the positions of its rows, among queries [slots, positions, heads, dim]."""
    rows = [(slot, position) for slot, own in tiles for position in own]
    slots, positions = torch.tensor(rows).T.contiguous()
    sizes = torch.tensor([len(own) for _, own in tiles])
    none = torch.zeros_like(slots)
    return attend_pages(
        query[slots, positions], arena, 0, sizes.cumsum(0) - sizes, sizes, positions, slots, none, none, 0.2,
        num_splits(length),
    )  # fmt: skip


@each_dtype
@each_limit
@pytest.mark.parametrize("heads", [3, 17])
def test_attention_is_batch_invariant(
    heads: int, limits: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several rows to a tile, and with two blocks of heads, of which the last has fewer."""
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "SPLIT", SPLIT)
    monkeypatch.setattr(attention, "BLOCK", SPLIT)
    pages = -(-LENGTH // PAGE)
    arena = KVArena(
        1, 1, SLOTS * pages * PAGE, RANK + ROTARY, dtype, CPU, (SLOTS, pages), PAGE, latent_rank=RANK
    )  # fmt: skip
    order = torch.randperm(SLOTS * pages).tolist()
    for slot in range(SLOTS):
        arena.assign(slot, 0, order[slot * pages : (slot + 1) * pages])
    arena.keys[0].normal_()
    query, tile = torch.randn(SLOTS, LENGTH, heads, RANK + ROTARY).to(dtype), rows_per_tile(dtype, heads, True)
    ranges = [range(LENGTH - tile, LENGTH), range(SPLIT - 1, SPLIT), range(1)]
    with monkeypatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(attention, name, limit)
        together = attend(query, arena, [*enumerate(ranges), (0, range(0))], 8 * SPLIT)
    for result, (slot, position) in zip(
        together, [(slot, at) for slot, own in enumerate(ranges) for at in own], strict=True
    ):
        columns = arena.columns_of(slot, 0, position + 1)
        keys = arena.keys[0][:, columns].expand(heads, -1, -1).double()
        expected = attended_row(query[slot, position].double(), keys, keys[..., :RANK], 0.2, FULL_ATTENTION)
        torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        alone = attend(query, arena, [(slot, range(position, position + 1))], position + 1)
        assert torch.equal(alone[0], result)


@each_dtype
def test_a_gemm_per_head_is_batch_invariant(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(3, 70, 36).to(dtype), torch.randn(70, 3, 36).to(dtype)
    gemm, results = HeadGemm(weight), torch.zeros(70, 3, 75, dtype=dtype)
    assert gemm(x, results) is results
    expected = torch.einsum("rhi,hoi->rho", x.double(), weight.double())
    torch.testing.assert_close(results[..., :70].double(), expected, atol=0.1, rtol=TOLERANCES[dtype])
    assert not results[..., 70:].any()
    for count in (1, 17, 64):
        assert torch.equal(gemm(x[-count:].contiguous()), results[-count:, :, :70])
    assert kernels.head_gemm_agrees(gemm, [8, 40])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("best experts rank groups", marks=pytest.mark.slow),
        "dense, pairs half a head apart",
        pytest.param("plain queries", marks=pytest.mark.slow),
        pytest.param("scaled positions", marks=pytest.mark.slow),
        pytest.param("glm", marks=pytest.mark.slow),
    ],
)
def test_kernels_match_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    family, changes = VARIANTS[name]
    folder, tokens = save_latent(tmp_path, family, {**changes, "num_hidden_layers": 2}), random_tokens(20)
    engine = load_by_kernels(monkeypatch, folder, max_model_len=40)
    together = check_against_transformers(engine, folder, 1e-4)
    assert torch.equal(engine.forward([Span(1, 3, tokens[3:6], 3)]), together[3:6])
    engine.forward([Span(1, 6, [1, 2], 0)])
    branch = Span(1, 6, tokens[6:9], 3, prefix_length=6, offset=2)
    assert torch.equal(engine.forward([branch]), together[6:9])


def test_replayed_passes_have_the_bits_of_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = imitate_graphs(monkeypatch, rows=8)
    family, changes = VARIANTS["dense, pairs half a head apart"]
    folder = save_latent(tmp_path, family, {**changes, "num_hidden_layers": 1})
    engine = load_engine(folder, False, native=False, max_sequences=3, max_model_len=32)
    assert isinstance(engine.forward_pass, CapturedModel)
    assert engine.supports_branches
    assert engine.draft_loop is not None
    tokens = random_tokens(12)
    with engine.forward_pass.eager():
        expected = engine.forward([Span(1, 0, tokens, 12)])
    replayed = fake.replayed
    parts = [engine.forward([Span(0, 0, tokens[:8], 8)]), engine.forward([Span(0, 8, tokens[8:], 4)])]
    assert torch.equal(torch.cat(parts), expected)
    assert fake.replayed == replayed + 2


@pytest.mark.parametrize("heads", [3, pytest.param(17, marks=pytest.mark.slow)])
def test_the_self_test_probes_latent_attention(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, smaller in (("SPLIT", 32), ("BLOCK", 32), ("BUSY_PROGRAMS", 2)):
        monkeypatch.setattr(attention, name, smaller)
    monkeypatch.setattr(kernels, "POSITIONS", (30,))
    arena = KVArena(1, 1, 16, 26, torch.float32, CPU, tables=(1, 1), page_size=16, latent_rank=20)
    assert kernels.attention_agrees(arena, heads, 34)

    def attend_unevenly(query: torch.Tensor, *others: object) -> torch.Tensor:
        return attend_pages(query, *others) * (1 + 1e-6 * (len(query) > 1))  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "attend_pages", attend_unevenly)
    assert not kernels.attention_agrees(arena, heads, 34)
