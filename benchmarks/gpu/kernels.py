"""Checks every GPU kernel at the target's sizes: error against float64, and batch invariance."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.gpu.part import Findings, Row, Settings
from benchmarks.gpu.steps import seconds_each
from benchmarks.sampling import RULES
from benchmarks.shapes import SHAPES
from specpool.engine.cache.arena import KVArena
from specpool.engine.passes.gpu.attention import attend_extents, num_splits, rows_per_tile
from specpool.engine.passes.gpu.cublas import restrict_cublas
from specpool.engine.passes.gpu.gemm import GEMM_BACKENDS, Gemm
from specpool.engine.passes.gpu.graphs import CudaGraphs
from specpool.engine.passes.gpu.rows import Addend, activate, add_and_norm, rotate_and_cache
from specpool.engine.passes.rotary import rotate
from specpool.engine.probes.inputs import ProbeInputs
from specpool.engine.probes.kernels import attention_agrees
from specpool.engine.sampling.kernel import sample_rows
from specpool.engine.sampling.sampler import choose_token
from specpool.protocol.sampling import SamplingParams

# Maximum relative error: about twice what rounding the inputs and the result causes.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-6
# Minimum seconds left to start a check, and to start a shape of GEMM.
CHECK_SECONDS, GEMM_SECONDS = 5, 15
# The attended sequence begins at this column of the cache.
ORIGIN = 7
# Rows and outputs of a GEMM that are compared with float64.
COMPARED = 64, 8192
# Bytes of distinct weights to multiply in turn when timing, so no cache holds them.
TIMED_BYTES = 2**28


# --- Kernels


@torch.inference_mode()
def measure_kernels(settings: Settings, findings: Findings) -> None:
    """Check every kernel, then check and time every GEMM of both models."""
    if torch.device(settings.device).type == "cuda":
        restrict_cublas()
    torch.manual_seed(0)
    kernels = Kernels(settings)

    def attempt(what: str, check: Callable[[], Row]) -> None:
        findings.attempt(settings, what, CHECK_SECONDS, lambda: findings.add_row("kernels", check()))

    for position in settings.sizes.positions:
        attempt(f"attention at position {position}", partial(kernels.attention, position))
    if not settings.rehearse:  # the interpreter takes minutes
        attempt("the probe of attention", kernels.attention_probe)
    checks = {"add_and_norm": kernels.adding, "rotate_and_cache": kernels.rotating, "activate": kernels.activating}
    for name, check in checks.items():
        for splits in (1, 2):
            attempt(f"{name}, split_k: {splits}", partial(check, splits))
    for name, rules in RULES.items():
        if SamplingParams(**rules).leaves_logits:  # penalties apply before the kernels
            attempt(f"sampling, {name}", partial(kernels.sampling, name))
    for model in dict.fromkeys((settings.target, settings.draft)):
        for name, (outputs, inputs) in gemm_shapes(model).items():
            case = f"{model}, {name}"
            add_rows = partial(add_gemm_rows, settings, findings, case, outputs, inputs, name != "head")
            findings.attempt(settings, f"GEMM: {case}", GEMM_SECONDS, add_rows)


class Kernels:
    """The kernels other than GEMM, at the sizes of a shape."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._sizes = settings, SHAPES[settings.target]
        self._dtype, self._device = settings.torch_dtype, torch.device(settings.device)
        self._heads, self._kv_heads = self._sizes["num_attention_heads"], self._sizes["num_key_value_heads"]
        self._groups, self._dim = self._heads // self._kv_heads, self._sizes["head_dim"]
        self._rows = settings.sizes.rows

    def attention(self, position: int) -> Row:
        """A row at a position: alone, last and first of a tile, and beside many others."""
        tile = rows_per_tile(self._dtype, self._groups)
        keys, values = self._settings.randn(2, self._kv_heads, ORIGIN + position + tile, self._dim)
        query = self._settings.randn(position + tile, self._heads, self._dim)
        alone, first = range(position, position + 1), range(position, position + tile)
        last = range(max(0, position + 1 - tile), position + 1)

        def attend(*tiles: range) -> torch.Tensor:
            positions = torch.tensor([each for tile in tiles for each in tile], device=self._device)
            sizes = torch.tensor([len(tile) for tile in tiles], device=self._device)
            begins, probed = sizes.cumsum(0) - sizes, int((positions == position).nonzero()[-1])
            no_branch = torch.zeros_like(positions)
            attended = attend_extents(
                query[positions], keys, values, begins, sizes, positions, positions + ORIGIN, no_branch, no_branch,
                self._dim**-0.5, num_splits(int(positions.max()) + 1),
            )  # fmt: skip
            return attended[probed]

        beside = [range(1)] * self._settings.sizes.beside
        reference = attend(alone)
        others = {"last of a tile": [last], "first of a tile": [first], "one of many": [*beside, alone],
                  "in a tile of many": [*beside, last]}  # fmt: skip
        differs = [name for name, tiles in others.items() if not torch.equal(attend(*tiles), reference)]
        seen = slice(ORIGIN, ORIGIN + position + 1)
        k, v = (cache[:, seen].repeat_interleave(self._groups, 0).double() for cache in (keys, values))
        expected = scaled_dot_product_attention(query[position, :, None].double(), k, v)[:, 0]
        return self._row("attention", f"position {position}", error(reference, expected), differs)

    def attention_probe(self) -> Row:
        """The verdict of the engine's self-test."""
        cache = self._settings.randn(self._kv_heads, 1, self._dim)
        agrees = attention_agrees(cache, self._groups, max(self._settings.sizes.positions) + 1)
        return self._row("attention", "the self-test's probe", None, [] if agrees else ["somewhere"])

    def adding(self, splits: int) -> Row:
        """`add_and_norm`."""
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
        """`rotate_and_cache`, with head norms."""
        width, rotated_heads = (self._heads + 2 * self._kv_heads) * self._dim, self._heads + self._kv_heads
        partials, norms = self._partials(splits, width), self._settings.randn(rotated_heads, self._dim)
        angles = torch.randn(self._rows, self._dim // 2, device=self._device)
        cosines, sines = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        rotary = cosines.to(self._dtype), sines.to(self._dtype)
        arena = KVArena(1, self._kv_heads, self._rows, self._dim, self._dtype, self._device)
        columns = torch.arange(self._rows, device=self._device)

        def run(rows: slice) -> torch.Tensor:
            own, added = columns[rows], partials[:, rows].contiguous()
            query = rotate_and_cache(added, None, norms, rotary, arena, 0, own, own, self._heads, EPS)
            cached = [cache[0][:, own].transpose(0, 1) for cache in (arena.keys, arena.values)]
            return torch.cat([query, *cached], 1)

        heads = partials.double().sum(0).view(self._rows, -1, self._dim)
        rotated = rotate(rms_norm(heads[:, :rotated_heads], norms), *(table.double()[:, None] for table in rotary))
        return self._compare("rotate_and_cache", splits, run, torch.cat([rotated, heads[:, rotated_heads:]], 1))

    def activating(self, splits: int) -> Row:
        """`activate`."""
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
        together = sample_rows(on_device, rules)
        alone = [sample_rows(on_device[row : row + 1], rules[row : row + 1])[0] for row in range(rows)]
        differs = [f"row {row}" for row in range(rows) if alone[row] != together[row]]
        wrong = sum(one != other for one, other in zip(together, expected, strict=True)) / rows
        return {**self._row("sampling", name, wrong, differs), "near": wrong == 0}

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


# --- GEMM


def gemm_shapes(model: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the GEMMs of a model, by name."""
    sizes = SHAPES[model]
    hidden, intermediate, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden), "out": (hidden, heads * dim),
        "gate_up": (2 * intermediate, hidden), "down": (hidden, intermediate), "head": (sizes["vocab_size"], hidden),
    }  # fmt: skip


def add_gemm_rows(settings: Settings, findings: Findings, case: str, outputs: int, inputs: int, split: bool) -> None:
    """Add a row for each backend of a shape, including whether it matches the first backend bit for bit."""
    gemm = Gemm(settings.randn(outputs, inputs) * inputs**-0.5, split)
    weight, x = ProbeInputs(gemm.weight).gemm(outputs, inputs, settings.sizes.rows)
    probe = Gemm(weight, split)
    first: torch.Tensor | None = None
    for backend in GEMM_BACKENDS:
        gemm.backend = probe.backend = backend
        bits = probe(x[: COMPARED[0]].clone()).float().sum(0).to(x.dtype)
        first = bits if first is None else first
        findings.add_row("gemm", {
            "gemm": case, "outputs": outputs, "inputs": inputs, "backend": backend, "split_k": gemm.split_k,
            **check_gemm(settings, gemm, probe, x), **gemm_microseconds(settings, gemm),
            f"as_{GEMM_BACKENDS[0]}": torch.equal(bits, first),
        })  # fmt: skip


def check_gemm(settings: Settings, gemm: Gemm, probe: Gemm, x: torch.Tensor) -> Row:
    """The error and batch invariance of a GEMM. `probe`: a GEMM of this shape. `x`: rows whose dot products cancel."""

    def run(rows: slice) -> torch.Tensor:
        partials: torch.Tensor = probe(x[rows].clone())  # aligned as in a pass
        return partials.transpose(0, 1)  # [rows, split_k, outputs]

    differs = counts_that_differ(run, run(slice(0, len(x))), row_counts(len(x)))
    rows, outputs = COMPARED
    ordinary = settings.randn(rows, gemm.in_features)
    expected = ordinary.double() @ gemm.weight[-outputs:].double().T
    relative_error = error(gemm(ordinary).double().sum(0)[:, -outputs:], expected)
    near = relative_error <= TOLERANCES[settings.torch_dtype]
    return {"error": relative_error, "near": near, "exact": not differs, "differs": differs}


def gemm_microseconds(settings: Settings, gemm: Gemm) -> dict[str, float]:
    """The time of a GEMM by row count, captured as in a pass."""
    copies = min(settings.sizes.weights, -(-TIMED_BYTES // gemm.weight.nbytes))
    gemms = [Gemm(gemm.weight.clone(), split=gemm.split_k > 1) for _ in range(copies)]
    for each in gemms:
        each.backend = gemm.backend
    capture = None if gemm.weight.device.type == "cpu" else CudaGraphs()
    microseconds = {}
    for rows in settings.sizes.timed_rows:
        x = settings.randn(rows, gemm.in_features)

        def run(x: torch.Tensor = x) -> torch.Tensor:
            results: list[torch.Tensor] = [each(x) for each in gemms]
            return results[-1]

        run()  # compiles
        timed: Callable[[], object] = run if capture is None else capture(run)[0]
        microseconds[f"us_of_{rows}"] = round(seconds_each(settings, timed) / copies * 1e6, 1)
    return microseconds


# --- Comparisons


def row_counts(maximum: int) -> list[int]:
    """Row counts to compare: all small ones, then multiples of 32 and their neighbours."""
    near = (count + step for count in range(96, maximum + 1, 32) for step in (-1, 0, 1))
    return sorted({*range(1, min(64, maximum)), *(count for count in near if count <= maximum), maximum})


def counts_that_differ(
    run: Callable[[slice], torch.Tensor], together: torch.Tensor, counts: Sequence[int]
) -> list[int]:
    """Row counts at which the last rows differ from the same rows in the largest batch."""
    total = len(together)
    return [count for count in counts if not torch.equal(run(slice(total - count, total)), together[total - count :])]


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the error, relative to the norm of the float64 result."""
    return float((result.double() - expected).norm() / expected.norm())


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float64."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
