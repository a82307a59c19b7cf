"""Every kernel of a GPU's pass at the target's sizes: error against float64, and rows alone and among others."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.gpu import products
from benchmarks.gpu.part import Findings, Row, Settings
from benchmarks.sampling import RULES
from benchmarks.shapes import SHAPES
from specpool.engine.cache.arena import KVArena
from specpool.engine.passes.gpu.attention import attend_extents, rows_per_tile, splits_for
from specpool.engine.passes.gpu.cublas import restrict_cublas
from specpool.engine.passes.gpu.rows import Addend, activate, add_and_norm, rotate_and_cache
from specpool.engine.passes.rotary import rotate
from specpool.engine.probes.kernels import attention_agrees
from specpool.engine.sampling.kernel import sample_rows
from specpool.engine.sampling.sampler import choose_token
from specpool.protocol.sampling import SamplingParams

# Norm of the error, of the norm of the result: about twice what rounding the inputs and the result takes.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-6
# Seconds without which a check is not begun.
LONGEST_CHECK = 5
# The cache of the attended sequence begins behind this many columns.
ORIGIN = 7


@torch.inference_mode()
def measure(settings: Settings, findings: Findings) -> None:
    """The part of `benchmarks.gpu`."""
    if torch.device(settings.device).type == "cuda":
        restrict_cublas()
    torch.manual_seed(0)
    kernels = Kernels(settings)

    def attempt(what: str, check: Callable[[], Row]) -> None:
        findings.attempt(settings, what, LONGEST_CHECK, lambda: findings.add_row("kernels", check()))

    for position in settings.sizes.positions:
        attempt(f"attention at position {position}", partial(kernels.attention, position))
    if not settings.rehearse:  # interpreted, it takes minutes
        attempt("the probe of attention", kernels.attention_by_the_probe)
    checks = {"add_and_norm": kernels.adding, "rotate_and_cache": kernels.rotating, "activate": kernels.activating}
    for name, check in checks.items():
        for parts in (1, 2):
            attempt(f"{name}, parts: {parts}", partial(check, parts))
    for name, rules in RULES.items():
        if SamplingParams(**rules).leaves_logits:  # penalties come before the kernels
            attempt(f"sampling, {name}", partial(kernels.sampling, name))
    products.measure(settings, findings)


class Kernels:
    """The kernels but the products, at the sizes of a shape."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._sizes = settings, SHAPES[settings.target]
        self._dtype, self._device = settings.torch_dtype, torch.device(settings.device)
        self._heads, self._kv_heads = self._sizes["num_attention_heads"], self._sizes["num_key_value_heads"]
        self._dim, self._rows = self._sizes["head_dim"], settings.sizes.rows
        self._counts = row_counts(self._rows)

    def attention(self, position: int) -> Row:
        """A row at a position: alone, last and first of a tile, and beside many others."""
        tile = rows_per_tile(self._dtype, self._heads // self._kv_heads)
        longest = position + tile
        keys, values = self._random(2, self._kv_heads, ORIGIN + longest, self._dim)
        query = self._random(longest, self._heads, self._dim)
        alone, first = range(position, position + 1), range(position, position + tile)
        last = range(max(0, position + 1 - tile), position + 1)

        def attend(*tiles: range) -> torch.Tensor:
            own = [at for positions in tiles for at in positions]
            sizes = [len(positions) for positions in tiles]
            begins = [sum(sizes[:index]) for index in range(len(sizes))]
            its, its_begins, its_sizes = (
                torch.tensor(numbers, device=self._device) for numbers in (own, begins, sizes)
            )
            splits, scaling = splits_for(max(own) + 1), self._dim**-0.5
            attended = attend_extents(
                query[its], keys, values, its_begins, its_sizes, its, its + ORIGIN, scaling, splits
            )
            return attended[len(own) - 1 - own[::-1].index(position)]

        beside = [range(1)] * self._settings.sizes.beside
        reference = attend(alone)
        others = {"last of a tile": [last], "first of a tile": [first], "one of many": [*beside, alone],
                  "in a tile of many": [*beside, last]}  # fmt: skip
        differs = [name for name, tiles in others.items() if not torch.equal(attend(*tiles), reference)]
        seen = slice(ORIGIN, ORIGIN + position + 1)
        k, v = (its[:, seen].repeat_interleave(self._heads // self._kv_heads, 0).double() for its in (keys, values))
        expected = scaled_dot_product_attention(query[position, :, None].double(), k, v)[:, 0]
        return self._row("attention", f"position {position}", error(reference, expected), differs)

    def attention_by_the_probe(self) -> Row:
        """What the self-test of an engine says."""
        cache = self._random(self._kv_heads, 1, self._dim)
        agrees = attention_agrees(cache, self._heads // self._kv_heads, max(self._settings.sizes.positions) + 1)
        return self._row("attention", "the self-test's probe", None, [] if agrees else ["somewhere"])

    def adding(self, parts: int) -> Row:
        """`add_and_norm`."""
        size = self._sizes["hidden_size"]
        hidden, added, weight = self._random(self._rows, size), self._parts(parts, size), self._random(size)

        def run(rows: slice) -> torch.Tensor:
            own = hidden[rows].clone()
            normed = add_and_norm(own, Addend(added[:, rows].contiguous(), None, None), weight, EPS)
            return torch.stack([own, normed], 1)

        whole = hidden.double() + added.double().sum(0)
        rounded = whole.to(self._dtype).double()  # the kernel norms what it keeps
        return self._among_others("add_and_norm", parts, run, torch.stack([whole, normed(rounded, weight)], 1))

    def rotating(self, parts: int) -> Row:
        """`rotate_and_cache`, with norms of heads."""
        width, turned = (self._heads + 2 * self._kv_heads) * self._dim, self._heads + self._kv_heads
        added, norms = self._parts(parts, width), self._random(turned, self._dim)
        angles = torch.randn(self._rows, self._dim // 2, device=self._device)
        cosines, sines = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        rotary = cosines.to(self._dtype), sines.to(self._dtype)
        arena = KVArena(1, self._kv_heads, self._rows, self._dim, self._dtype, self._device)
        places = torch.arange(self._rows, device=self._device)

        def run(rows: slice) -> torch.Tensor:
            own, mine = places[rows], added[:, rows].contiguous()
            query = rotate_and_cache(mine, None, norms, rotary, arena, 0, own, own, self._heads, EPS)
            cached = [its[0][:, own].transpose(0, 1) for its in (arena.keys, arena.values)]
            return torch.cat([query, *cached], 1)

        each = added.double().sum(0).view(self._rows, -1, self._dim)
        rotated = rotate(normed(each[:, :turned], norms), *(table.double()[:, None] for table in rotary))
        return self._among_others("rotate_and_cache", parts, run, torch.cat([rotated, each[:, turned:]], 1))

    def activating(self, parts: int) -> Row:
        """`activate`."""
        added = self._parts(parts, 2 * self._sizes["intermediate_size"])
        gate, up = added.double().sum(0).chunk(2, -1)

        def run(rows: slice) -> torch.Tensor:
            return activate(added[:, rows].contiguous(), None, self._dtype)

        return self._among_others("activate", parts, run, silu(gate) * up)

    def sampling(self, name: str) -> Row:
        """Rows of logits all with the same rules, whose choices are a CPU's or not."""
        rows = self._settings.sizes.sampled
        logits = (torch.randn(rows, self._sizes["vocab_size"]) * 3).to(self._dtype)
        rules = [(SamplingParams(**RULES[name], seed=row), 1) for row in range(rows)]
        expected = [choose_token(row, params, [0]) for row, (params, _) in zip(logits, rules, strict=True)]
        there = logits.to(self._device)
        together = sample_rows(there, rules)
        alone = [sample_rows(there[row : row + 1], rules[row : row + 1])[0] for row in range(rows)]
        differs = [f"row {row}" for row in range(rows) if alone[row] != together[row]]
        wrong = sum(one != other for one, other in zip(together, expected, strict=True)) / rows
        return {**self._row("sampling", name, wrong, differs), "near": wrong == 0}

    def _among_others(self, name: str, parts: int, run: Callable[[slice], torch.Tensor], expected: torch.Tensor) -> Row:
        """The row of a kernel that runs on some of all rows."""
        together = run(slice(0, self._rows))
        differs = counts_that_differ(run, together, self._counts)
        return self._row(name, f"{self._rows} rows, parts: {parts}", error(together, expected), differs)

    def _row(self, kernel: str, case: str, its: float | None, differs: Sequence[Any]) -> Row:
        near = None if its is None else its <= TOLERANCES[self._dtype]
        return {"kernel": kernel, "case": case, "error": its, "near": near, "same_bits": not differs,
                "differs": list(differs)}  # fmt: skip

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).to(self._dtype)

    def _parts(self, parts: int, size: int) -> torch.Tensor:
        """Parts of a product: of several, float32."""
        whole = torch.randn(parts, self._rows, size, device=self._device)
        return whole.to(self._dtype) if parts == 1 else whole


def row_counts(most: int) -> list[int]:
    """Numbers of rows up to `most`: all small ones, then multiples of 32 and those beside them."""
    beside = (count + step for count in range(96, most + 1, 32) for step in (-1, 0, 1))
    return sorted({*range(1, min(64, most)), *(count for count in beside if count <= most), most})


def counts_that_differ(
    run: Callable[[slice], torch.Tensor], together: torch.Tensor, counts: Sequence[int]
) -> list[int]:
    """Numbers of rows with which the last rows do not have the bits that they have among all."""
    whole = len(together)
    return [count for count in counts if not torch.equal(run(slice(whole - count, whole)), together[whole - count :])]


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the error, of the norm of what float64 gives."""
    return float((result.double() - expected).norm() / expected.norm())


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The root-mean-square norm in float64."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
