"""The GPU kernels, in Triton's interpreter: close to float64, and batch-invariant."""

from collections.abc import Sequence

import pytest
import torch
from interpreted_kernels import attended_row
from torch.nn.functional import gelu, silu

from specpool.engine.cache.arena import KVArena
from specpool.engine.passes.gpu import attention
from specpool.engine.passes.gpu import gemm as gpu_gemm
from specpool.engine.passes.gpu.attention import attend_pages, num_splits, rows_per_tile
from specpool.engine.passes.gpu.gates import gated, gated_norm
from specpool.engine.passes.gpu.gemm import Gemm, cublas_rows_of
from specpool.engine.passes.gpu.rows import Addend, Recorder, activate, add_and_norm, cap_logits, rotate_and_cache
from specpool.engine.passes.kinds import FULL_ATTENTION, SILU, Activation, AttentionKind
from specpool.engine.passes.rotary import rotate

pytest.importorskip("triton")

CPU = torch.device("cpu")
# The interpreter does not support bfloat16.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-2}
# Smaller than the real ones, since the interpreter is slow. A page of 16 is smaller than a block, one of 64 larger.
SPLIT, BLOCK = 64, 32
PAGE_SIZES = (16, 64)
ENDS = (0, 15, 16, SPLIT - 1, SPLIT, 2 * SPLIT + 1)

LIMITS: dict[str, dict[str, int]] = {
    "a program per split": {},
    "one for all splits": {"BUSY_PROGRAMS": 1},
    "too many splits": {"MAX_PARTIAL_BYTES": 0},
}

each_dtype = pytest.mark.parametrize("dtype", TOLERANCES)
each_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", SPLIT)
    monkeypatch.setattr(attention, "BLOCK", BLOCK)
    torch.manual_seed(0)


def assert_near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), expected.double(), atol=tolerance, rtol=tolerance)


# --- Attention


def arena_of(
    lengths: Sequence[int], kv_heads: int, dim: int, dtype: torch.dtype, page_size: int, layers: int = 1
) -> KVArena:
    """Create sequences with these numbers of logical columns, on shuffled pages filled with random numbers."""
    counts = [-(-length // page_size) for length in lengths]
    pages, tables = torch.randperm(sum(counts)).tolist(), (len(counts), max(counts))
    arena = KVArena(layers, kv_heads, len(pages) * page_size, dim, dtype, CPU, tables, page_size)
    for slot, count in enumerate(counts):
        arena.assign(slot, 0, [pages.pop() for _ in range(count)])
    for cache in (*arena.keys, *arena.values):
        cache.normal_()
    return arena


class Cache:
    """Sequences in a cache, and queries for all their positions."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, page_size: int) -> None:
        length = ENDS[-1] + 1
        self.arena = arena_of([length] * len(ENDS), kv_heads, dim, dtype, page_size)
        self.query = torch.randn(len(ENDS), length, heads, dim).to(dtype)

    def attend(
        self, tiles: Sequence[tuple[int, range]], length: int, kind: AttentionKind = FULL_ATTENTION
    ) -> torch.Tensor:
        """The results of tiles. Each is a sequence and the positions of its rows."""
        rows = [(sequence, position) for sequence, positions in tiles for position in positions]
        sizes = [len(positions) for _, positions in tiles]
        begins = torch.tensor([sum(sizes[:index]) for index in range(len(sizes))])
        query = torch.stack([self.query[sequence, position] for sequence, position in rows])
        slots, positions = torch.tensor(rows).T.contiguous()
        scaling, splits, none = query.shape[-1] ** -0.5, num_splits(length), torch.zeros_like(slots)
        return attend_pages(
            query, self.arena, 0, begins, torch.tensor(sizes), positions, slots, none, none, scaling, splits, kind
        )

    def expected(self, sequence: int, position: int, kind: AttentionKind = FULL_ATTENTION) -> torch.Tensor:
        """The result in float64."""
        first = 0 if kind.window is None else max(0, position + 1 - kind.window)
        query, columns = self.query[sequence, position].double(), self.columns(sequence, position + 1)[first:]
        caches = (self.arena.keys[0], self.arena.values[0])
        k, v = (cache[:, columns].repeat_interleave(len(query) // len(cache), 0).double() for cache in caches)
        return attended_row(query, k, v, query.shape[-1] ** -0.5, kind)

    def columns(self, sequence: int, count: int) -> list[int]:
        return self.arena.columns_of(sequence, 0, count)


@each_dtype
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "limits"),
    [*((6, 2, 80, 16, limits) for limits in LIMITS.values()), (10, 2, 32, 64, {}), (1, 1, 256, 48, {})],
)
def test_attention_is_batch_invariant(
    heads: int, kv_heads: int, dim: int, page_size: int, limits: dict[str, int], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cache = Cache(heads, kv_heads, dim, dtype, page_size)
    with monkeypatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(attention, name, limit)
        together = cache.attend([(i, range(end, end + 1)) for i, end in enumerate(ENDS)], ENDS[-1] + 1)
    for sequence, end in enumerate(ENDS):
        assert_near(together[sequence], cache.expected(sequence, end), dtype)
        alone = cache.attend([(sequence, range(end, end + 1))], end + 1)
        assert torch.equal(alone[0], together[sequence])


@each_dtype
def test_rows_in_a_tile_match_rows_alone(dtype: torch.dtype) -> None:
    cache, height = Cache(3, 1, 32, dtype, page_size=16), rows_per_tile(dtype, 3)
    assert height >= 5
    for end in (height, SPLIT + 2):  # with the second end, only some rows see the last split
        tile = range(end - height + 1, end + 1)
        together = cache.attend([(2, tile), (0, range(1))], end + 1)
        for row in (0, height // 2, height - 3, height - 1):
            alone = cache.attend([(2, range(tile[row], tile[row] + 1))], tile[row] + 1)
            assert torch.equal(alone[0], together[row])


@each_page_size
def test_invisible_positions_do_not_affect_a_row(page_size: int) -> None:
    cache = Cache(2, 1, 16, torch.float32, page_size)
    expected, seen = cache.attend([(0, range(5, 6))], 6), cache.columns(0, 6)
    unseen = [column for column in range(cache.arena.columns) if column not in seen]
    cache.arena.keys[0][:, unseen] = cache.arena.values[0][:, unseen] = torch.nan
    assert torch.equal(cache.attend([(0, range(5, 6))], 6), expected)


def attend_from(
    arena: KVArena, query: torch.Tensor, prefix_length: int, start: int, offsets: Sequence[int], kind: AttentionKind
) -> torch.Tensor:
    """Attend from branches of slot 0, each in its own tile. `query`: [branches, rows, heads, dim]."""
    branches, count, _, dim = query.shape
    positions = torch.arange(start, start + count).repeat(branches)
    shifts = torch.tensor(offsets).repeat_interleave(count)
    begins, sizes = torch.arange(branches) * count, torch.full((branches,), count)
    return attend_pages(
        query.flatten(0, 1).clone(), arena, 0, begins, sizes, positions, torch.zeros_like(positions),
        torch.full_like(positions, prefix_length), shifts, dim**-0.5, num_splits(start + count), kind,
    )  # fmt: skip


@each_page_size
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize(
    ("prefix_length", "window"),
    [(1, None), (BLOCK + 1, None), (2 * SPLIT + 1, None), (BLOCK + 1, BLOCK), (2 * SPLIT + 1, SPLIT + 9)],
)
def test_bits_do_not_depend_on_pages_and_branches(
    limits: dict[str, int], prefix_length: int, window: int | None, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare each of two branches on shuffled pages with a sequence on ordered columns."""
    for name, limit in limits.items():
        monkeypatch.setattr(attention, name, limit)
    heads, kv_heads, dim, count, start, dtype = 6, 2, 16, 3, prefix_length + BLOCK, torch.float16
    end, offsets = start + count, (2, BLOCK + 7)  # the branches have columns in several pages
    arena, query = arena_of([end + max(offsets)], kv_heads, dim, dtype, page_size), torch.randn(2, count, heads, dim)
    query, kind = query.to(dtype), AttentionKind(window)
    together = attend_from(arena, query, prefix_length, start, offsets, kind)
    for index, (offset, results) in enumerate(zip(offsets, together.split(count), strict=True)):
        columns = arena.columns_of(0, 0, prefix_length)
        columns += arena.columns_of(0, prefix_length + offset, end - prefix_length)
        ordered = KVArena.of_one_sequence(1, kv_heads, end, dim, dtype, CPU)
        for cache, scattered in ((ordered.keys[0], arena.keys[0]), (ordered.values[0], arena.values[0])):
            cache[:, :end] = scattered[:, columns]
        assert torch.equal(attend_from(ordered, query[index : index + 1], 0, start, [0], kind), results)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_padding_of_a_captured_pass_changes_no_bits(limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty tiles, and a maximum length above that of the sequences."""
    cache = Cache(2, 1, 16, torch.float32, page_size=64)
    tiles = [(sequence, range(end, end + 1)) for sequence, end in enumerate(ENDS)]
    expected = cache.attend(tiles, ENDS[-1] + 1)
    for name, limit in limits.items():
        monkeypatch.setattr(attention, name, limit)
    padded = cache.attend([*tiles, *[(0, range(0))] * 5], 16 * SPLIT)
    assert torch.equal(padded, expected)


def test_captured_passes_have_a_maximum_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-8B and of Llama-3.1-8B."""
    monkeypatch.setattr(attention, "BUSY_PROGRAMS", 512)  # as on a GPU

    def splits(rows: int, tiles: int, length: int) -> float:
        return attention.captured_length(rows, tiles, length * SPLIT, 32, 8, 128) / SPLIT

    assert [splits(8, 8, length) for length in (1, 5, 160, 512)] == [1, 5, 160, 512]
    assert [splits(64, tiles, 512) for tiles in (16, 64)] == [256, 512]  # with a tile per row, there are no partials
    assert splits(256, 63, 512) == 64


def test_partial_results_stay_small_in_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-8B and of Llama-3.1-8B, which have the same heads."""
    monkeypatch.setattr(attention, "BUSY_PROGRAMS", 512)  # as on a GPU
    # 256, 4096, 40,960 and 131,072 positions on a GPU
    lengths = [splits * attention.SPLIT for splits in (1, 16, 160, 512)]
    sizes = [attention.scratch_bytes(2048, length, 32, 8, 128, 16) for length in lengths]
    assert sizes[0] == 0 < sizes[1] < sizes[2] == sizes[3] == attention.MAX_PARTIAL_BYTES


# --- GEMM


@each_dtype
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (130, 100), (70, 512)])
def test_gemm_is_batch_invariant(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Also across row counts with other tiles. The interpreted dot adds terms in one order, like tensor cores."""
    gemm = Gemm((torch.randn(outputs, inputs) * inputs**-0.5).to(dtype))
    x = torch.randn(150, inputs).to(dtype)
    together = gemm(x)
    assert_near(together.double().sum(0), x.double() @ gemm.weight.double().T, dtype)
    for count in (1, 15, 16, 17, 33, 64):
        assert torch.equal(gemm(x[-count:]), together[:, -count:])


def test_cublas_multiplies_from_a_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_gemm, "split_k_gemm", lambda *_: "triton")
    monkeypatch.setattr(gpu_gemm, "cublas_gemm", lambda *_: "cublas")
    gemm = Gemm(torch.zeros(64, 100))

    def backends(cublas_rows: int | None) -> tuple[str, list[str]]:
        gemm.cublas_rows = cublas_rows
        return gemm.backends, [gemm(torch.zeros(rows, 100)) for rows in (1, 39, 40, 320)]

    assert backends(None) == ("triton", ["triton"] * 4)
    assert backends(cublas_rows_of("triton")) == ("triton", ["triton"] * 4)
    assert backends(cublas_rows_of("cublas")) == ("cublas", ["cublas"] * 4)
    assert backends(40) == ("triton, cublas from 40 rows", ["triton"] * 2 + ["cublas"] * 2)


# --- Between the GEMMs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def random_partials(splits: int, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(splits, rows, size).to(dtype if splits == 1 else torch.float32)


@each_dtype
@pytest.mark.parametrize(("size", "splits", "has_norm"), [(64, 1, True), (100, 3, True), (100, 1, False)])
def test_add_and_norm(dtype: torch.dtype, size: int, splits: int, has_norm: bool) -> None:
    hidden, weight = torch.randn(5, size).to(dtype), torch.rand(size).to(dtype)
    partials = random_partials(splits, 5, size, dtype)
    bias, norm = torch.randn(2, size).to(dtype) if has_norm else (None, None)
    added = partials.double().sum(0)
    if bias is not None and norm is not None:
        added = rms_norm(added + bias.double(), norm.double(), 1e-6)
    expected = hidden.double() + added
    before, alone = hidden.clone(), hidden[3:4].clone()
    states, slots = torch.zeros(5, 3, size, dtype=dtype), torch.tensor([-1, 2], dtype=torch.int32)
    normed = add_and_norm(hidden, Addend(partials, bias, norm), weight, 1e-6, Recorder(states, slots, 1))
    assert torch.equal(states[:, 2], hidden)
    assert not states[:, :2].any()
    assert_near(hidden, expected, dtype)
    assert_near(normed, rms_norm(expected, weight.double(), 1e-6), dtype)
    normed_alone = add_and_norm(alone, Addend(partials[:, 3:4].contiguous(), bias, norm), weight, 1e-6)
    assert torch.equal(normed_alone[0], normed[3])
    assert torch.equal(alone[0], hidden[3])
    normed = add_and_norm(before, None, weight, 1e-6, Recorder(states.zero_(), slots, 0))
    assert_near(normed, rms_norm(before.double(), weight.double(), 1e-6), dtype)
    assert not states.any()


@each_dtype
@pytest.mark.parametrize(("dim", "splits", "has_norm"), [(16, 1, True), (80, 2, True), (80, 1, False)])
def test_rotate_and_cache(dtype: torch.dtype, splits: int, has_norm: bool, dim: int) -> None:
    heads, kv_heads, rows = 4, 2, 3
    width = (heads + 2 * kv_heads) * dim
    partials = random_partials(splits, rows, width, dtype)
    bias = torch.randn(width).to(dtype) if has_norm else None
    norms = torch.rand(heads + kv_heads, dim).to(dtype) if has_norm else None
    angles = torch.randn(40, dim // 2)
    rotary = torch.cat([angles.cos()] * 2, -1).to(dtype), torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    positions, slots, offsets = torch.tensor([39, 0, 7]), torch.tensor([1, 0, -1]), torch.tensor([6, 0, 0])
    arena = arena_of([16, 48], kv_heads, dim, dtype, page_size=16, layers=2)
    before = [cache.clone() for cache in (*arena.keys, *arena.values)]
    query = rotate_and_cache(partials, bias, norms, rotary, arena, 1, positions, slots, offsets, heads, 1e-6)

    summed = (partials.double().sum(0) + (0 if bias is None else bias.double())).view(rows, -1, dim)
    query_key, value = summed.split([heads + kv_heads, kv_heads], 1)
    if norms is not None:
        query_key = rms_norm(query_key, norms.double(), 1e-6)
    rotated = rotate(query_key, *(table.double()[positions, None] for table in rotary))
    assert_near(query, rotated[:, :heads], dtype)
    columns = arena.columns_of(1, 45, 1) + arena.columns_of(0, 0, 1)
    for row, column in enumerate(columns):
        assert_near(arena.keys[1][:, column], rotated[row, heads:], dtype)
        assert_near(arena.values[1][:, column], value[row], dtype)
    for layer, (cache, old) in enumerate(zip((*arena.keys, *arena.values), before, strict=True)):
        if layer % 2:
            cache[:, columns] = old[:, columns]
        assert torch.equal(cache, old)


@pytest.mark.filterwarnings("ignore:overflow")
def test_overflow_is_cached_as_zero() -> None:
    dim = 16
    partials = torch.full((1, 1, 3 * dim), 1e30)
    arena = KVArena.of_one_sequence(1, 1, 1, dim, torch.float16, CPU)
    tables = torch.ones(1, dim, dtype=torch.float16), torch.zeros(1, dim, dtype=torch.float16)
    first = torch.zeros(1, dtype=torch.long)
    query = rotate_and_cache(partials, None, None, tables, arena, 0, first, first, first, 1, 1e-6)
    assert torch.isinf(query).all()
    assert not arena.keys[0].any()
    assert not arena.values[0].any()


@each_dtype
@pytest.mark.parametrize(
    ("size", "splits", "activation"),
    [(96, 1, SILU), (1500, 2, SILU), (96, 2, Activation("gelu_tanh")), (96, 1, Activation("silu", 1.702, 1.5, 1.0))],
)
def test_activate(dtype: torch.dtype, splits: int, size: int, activation: Activation) -> None:
    partials = random_partials(splits, 3, 2 * size, dtype)
    bias = torch.randn(2 * size).to(dtype) if splits == 2 else None
    gate, up = (partials.double().sum(0) + (0 if bias is None else bias.double())).chunk(2, -1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    is_gelu, alpha = activation.function == "gelu_tanh", activation.alpha
    expected = gelu(gate, approximate="tanh") if is_gelu else silu(alpha * gate) / alpha
    result = activate(partials, bias, dtype, activation)
    assert_near(result, expected * (up + activation.shift), dtype)
    assert torch.equal(activate(partials[:, 1:2].contiguous(), bias, dtype, activation)[0], result[1])
    partials[0, 1] = torch.nan
    assert activate(partials, bias, dtype, activation)[1].isnan().all()


@each_dtype
def test_logits_are_capped_in_place(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 1500) * 40).to(dtype)
    expected, alone = 30 * torch.tanh(logits.double() / 30), cap_logits(logits[1:2].clone(), 30.0)
    assert cap_logits(logits, 30.0) is logits
    assert_near(logits / 30, expected / 30, dtype)
    assert torch.equal(alone[0], logits[1])


@each_dtype
@pytest.mark.parametrize("splits", [1, 2])
def test_gates(dtype: torch.dtype, splits: int) -> None:
    read, weight, heads, dim, first = torch.randn(5, 3, 6), torch.rand(6), 3, 6, 7
    partials, bias = random_partials(splits, 5, first + heads * dim + 2, dtype), torch.randn(27).to(dtype)
    gates = partials.double().sum(0)[:, first : first + heads * dim].view(read.shape)
    result = gated_norm(read, partials, first, weight, dtype, 1e-6)
    expected = rms_norm(read.double(), weight.double(), 1e-6) * silu(gates)
    assert_near(result, expected.flatten(1), dtype)
    assert torch.equal(gated_norm(read[3:4], partials[:, 3:4].contiguous(), first, weight, dtype, 1e-6)[0], result[3])
    attended = read.to(dtype)
    expected = attended.double() * (gates + bias[first : first + heads * dim].double().view(heads, dim)).sigmoid()
    assert_near(gated(attended, partials, bias, first), expected, dtype)
