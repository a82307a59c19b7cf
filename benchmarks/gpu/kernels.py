"""Checks the GPU kernels other than GEMM at the target's sizes: error against float64, and batch invariance."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.gpu.gemms import EPS, TOLERANCES, counts_that_differ, error, rms_norm, row_counts
from benchmarks.gpu.part import Findings, Row, Settings
from benchmarks.shapes import SHAPES
from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.layout import GPU_PAGE_SIZE
from specpool.engine.passes.gpu.attention import attend_pages, num_splits, rows_per_tile
from specpool.engine.passes.gpu.rows import Addend, activate, add_and_norm, rotate_and_cache
from specpool.engine.passes.kinds import FULL_ATTENTION, AttentionKind
from specpool.engine.passes.rotary import rotate
from specpool.engine.probes.kernels import attention_agrees
from specpool.engine.sampling.kernel import sample_rows
from specpool.engine.sampling.sampler import choose_token
from specpool.protocol.sampling import SamplingParams

RULES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top_p, penalties": {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}
# Minimum seconds left to start a check.
CHECK_SECONDS = 2


def measure_attention(settings: Settings, findings: Findings) -> None:
    """Check attention at the edges of its splits, and the verdict of the engine's self-test."""
    kernels = Kernels(settings)
    checks: dict[str, Callable[[], Row]] = {
        f"position {position}": partial(kernels.attention, position) for position in settings.sizes.positions
    }
    if not settings.rehearse:  # the interpreter takes minutes
        checks["self-test"] = kernels.attention_probe
    check(settings, findings, checks)


def measure_rows(settings: Settings, findings: Findings) -> None:
    kernels = Kernels(settings)
    checks = {"add_and_norm": kernels.adding, "rotate_and_cache": kernels.rotating, "activate": kernels.activating}
    cases = {f"{name}, split_k: {splits}": partial(run, splits) for name, run in checks.items() for splits in (1, 2)}
    check(settings, findings, cases)


def measure_sampling(settings: Settings, findings: Findings) -> None:
    """Check sampling with each set of rules. Penalties apply before the kernel."""
    kernels = Kernels(settings)
    names = [name for name, rules in RULES.items() if SamplingParams(**rules).leaves_logits]
    check(settings, findings, {name: partial(kernels.sampling, name) for name in names})


@torch.inference_mode()
def check(settings: Settings, findings: Findings, checks: Mapping[str, Callable[[], Row]]) -> None:
    torch.manual_seed(0)

    def add_row(run: Callable[[], Row]) -> None:
        findings.add_row("kernels", run())

    for what, run in checks.items():
        findings.attempt(settings, what, CHECK_SECONDS, partial(add_row, run))


class Kernels:
    def __init__(self, settings: Settings) -> None:
        self._settings, self._sizes = settings, SHAPES[settings.target]
        self._dtype, self._device = settings.torch_dtype, torch.device(settings.device)
        self._heads, self._kv_heads = self._sizes["num_attention_heads"], self._sizes["num_key_value_heads"]
        self._groups, self._dim = self._heads // self._kv_heads, self._sizes["head_dim"]
        self._rows = settings.sizes.rows

    def attention(self, position: int) -> Row:
        """A row at a position: alone, last and first of a tile, and beside many others."""
        tile = rows_per_tile(self._dtype, self._groups)
        length = position + tile
        arena = self._arena(length)
        arena.keys[0].normal_()
        arena.values[0].normal_()
        query = self._settings.randn(length, self._heads, self._dim)
        alone, first = range(position, position + 1), range(position, position + tile)
        last = range(max(0, position + 1 - tile), position + 1)

        def attend(*tiles: range) -> torch.Tensor:
            positions = torch.tensor([each for tile in tiles for each in tile], device=self._device)
            sizes = torch.tensor([len(tile) for tile in tiles], device=self._device)
            begins, probed = sizes.cumsum(0) - sizes, int((positions == position).nonzero()[-1])
            slots = no_branch = torch.zeros_like(positions)
            attended = attend_pages(
                query[positions], arena, 0, begins, sizes, positions, slots, no_branch, no_branch,
                self._dim**-0.5, num_splits(int(positions.max()) + 1),
            )  # fmt: skip
            return attended[probed]

        beside = [range(1)] * self._settings.sizes.beside
        reference = attend(alone)
        others = {"last of a tile": [last], "first of a tile": [first], "one of many": [*beside, alone],
                  "in a tile of many": [*beside, last]}  # fmt: skip
        differs = [name for name, tiles in others.items() if not torch.equal(attend(*tiles), reference)]
        seen, caches = arena.columns_of(0, 0, position + 1), (arena.keys[0], arena.values[0])
        k, v = (cache[:, seen].repeat_interleave(self._groups, 0).double() for cache in caches)
        expected = scaled_dot_product_attention(query[position, :, None].double(), k, v)[:, 0]
        return self._row("attention", f"position {position}", error(reference, expected), differs)

    def attention_probe(self) -> Row:
        """The verdict of the engine's self-test."""
        arena, length = self._arena(1), max(self._settings.sizes.positions) + 1
        sinks = torch.linspace(-2, 2, self._heads, device=self._device)
        kinds = {
            "full": FULL_ATTENTION,
            "window": AttentionKind(300),
            "sinks, soft cap": AttentionKind(70, sinks, 30.0),
        }
        differs = [name for name, kind in kinds.items() if not attention_agrees(arena, self._groups, length, kind)]
        return self._row("attention", "the self-test's probe", None, differs)

    def adding(self, splits: int) -> Row:
        size = self._sizes["hidden_size"]
        hidden, weight = self._settings.randn(self._rows, size), self._settings.randn(size)
        partials = self._partials(splits, size)

        def run(rows: slice) -> torch.Tensor:
            own = hidden[rows].clone()
            normed = add_and_norm(own, Addend(partials[:, rows].contiguous(), None, None), weight, EPS)
            return torch.stack([own, normed], 1)

        total = hidden.double() + partials.double().sum(0)
        rounded = total.to(self._dtype).double()  # the kernel normalizes the rounded sum
        return self._compare("add_and_norm", splits, run, torch.stack([total, rms_norm(rounded, weight)], 1))

    def rotating(self, splits: int) -> Row:
        width, rotated_heads = (self._heads + 2 * self._kv_heads) * self._dim, self._heads + self._kv_heads
        partials, norms = self._partials(splits, width), self._settings.randn(rotated_heads, self._dim)
        angles = torch.randn(self._rows, self._dim // 2, device=self._device)
        cosines, sines = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        rotary = cosines.to(self._dtype), sines.to(self._dtype)
        arena = self._arena(self._rows)
        positions, columns = torch.arange(self._rows, device=self._device), arena.columns_of(0, 0, self._rows)

        def run(rows: slice) -> torch.Tensor:
            own, added = positions[rows], partials[:, rows].contiguous()
            slots = no_branch = torch.zeros_like(own)
            query = rotate_and_cache(added, None, norms, rotary, arena, 0, own, slots, no_branch, self._heads, EPS)
            cached = [cache[0][:, columns[rows]].transpose(0, 1) for cache in (arena.keys, arena.values)]
            return torch.cat([query, *cached], 1)

        heads = partials.double().sum(0).view(self._rows, -1, self._dim)
        rotated = rotate(rms_norm(heads[:, :rotated_heads], norms), *(table.double()[:, None] for table in rotary))
        return self._compare("rotate_and_cache", splits, run, torch.cat([rotated, heads[:, rotated_heads:]], 1))

    def activating(self, splits: int) -> Row:
        partials = self._partials(splits, 2 * self._sizes["intermediate_size"])
        gate, up = partials.double().sum(0).chunk(2, -1)

        def run(rows: slice) -> torch.Tensor:
            return activate(partials[:, rows].contiguous(), None, self._dtype)

        return self._compare("activate", splits, run, silu(gate) * up)

    def sampling(self, name: str) -> Row:
        """Rows of logits with the same rules, compared with the choices of a CPU."""
        rows = self._settings.sizes.sampled
        logits = (torch.randn(rows, self._sizes["vocab_size"]) * 3).to(self._dtype)
        rules = [(SamplingParams(**RULES[name], seed=row), 1) for row in range(rows)]
        expected = [choose_token(row, params, [0]) for row, (params, _) in zip(logits, rules, strict=True)]
        on_device = logits.to(self._device)
        together, _ = sample_rows(on_device, rules)
        alone = [sample_rows(on_device[row : row + 1], rules[row : row + 1])[0][0] for row in range(rows)]
        differs = [f"row {row}" for row in range(rows) if alone[row] != together[row]]
        wrong = sum(one != other for one, other in zip(together, expected, strict=True)) / rows
        return {**self._row("sampling", name, wrong, differs), "near": wrong == 0}

    def _arena(self, length: int) -> KVArena:
        """Create a one-layer cache for a sequence of this length, on shuffled pages."""
        pages = -(-length // GPU_PAGE_SIZE)
        columns, tables = pages * GPU_PAGE_SIZE, (1, pages)
        arena = KVArena(1, self._kv_heads, columns, self._dim, self._dtype, self._device, tables, GPU_PAGE_SIZE)
        arena.assign(0, 0, torch.randperm(pages).tolist())
        arena.flush()
        return arena

    def _compare(self, name: str, splits: int, run: Callable[[slice], torch.Tensor], expected: torch.Tensor) -> Row:
        """The result of a kernel that can run on a slice of the rows."""
        together = run(slice(0, self._rows))
        differs = counts_that_differ(run, together, row_counts(self._rows))
        return self._row(name, f"{self._rows} rows, split_k: {splits}", error(together, expected), differs)

    def _row(self, kernel: str, case: str, relative_error: float | None, differs: Sequence[Any]) -> Row:
        near = None if relative_error is None else relative_error <= TOLERANCES[self._dtype]
        return {"kernel": kernel, "case": case, "error": relative_error, "near": near, "same_bits": not differs,
                "differs": list(differs)}  # fmt: skip

    def _partials(self, splits: int, size: int) -> torch.Tensor:
        partials = torch.randn(splits, self._rows, size, device=self._device)
        return partials.to(self._dtype) if splits == 1 else partials
