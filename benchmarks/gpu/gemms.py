"""Checks and times the GEMMs of both models; compares kernels with float64 and by bits."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.gpu.engines import captured_microseconds
from benchmarks.gpu.part import Findings, Row, Settings
from benchmarks.shapes import SHAPES
from specpool.engine.passes.gpu.gemm import GEMM_BACKENDS, Gemm, cublas_rows_of, restrict_cublas
from specpool.engine.probes.inputs import ProbeInputs

# Maximum relative error: about twice what rounding the inputs and the result causes.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-6

# Minimum seconds left to start a shape.
GEMM_SECONDS = 5
# Rows and outputs that are compared with float64.
COMPARED = 64, 8192
# Bytes of distinct weights to multiply in turn when timing, so no cache holds them.
TIMED_BYTES = 2**28


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
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@torch.inference_mode()
def measure_gemms(settings: Settings, findings: Findings) -> None:
    if torch.device(settings.device).type == "cuda":
        restrict_cublas()
    torch.manual_seed(0)
    for model in dict.fromkeys((settings.target, settings.draft)):
        for name, (outputs, inputs) in gemm_shapes(model).items():
            case = f"{model}, {name}"
            add_rows = partial(add_gemm_rows, settings, findings, case, outputs, inputs, name != "head")
            findings.attempt(settings, case, GEMM_SECONDS, add_rows)


def gemm_shapes(model: str) -> dict[str, tuple[int, int]]:
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
        gemm.cublas_rows = probe.cublas_rows = cublas_rows_of(backend)
        bits = probe(x[: COMPARED[0]].clone())
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
    gemms = [Gemm(weight, split=gemm.split_k > 1) for weight in timed_weights(settings, gemm.weight)]
    for each in gemms:
        each.cublas_rows = gemm.cublas_rows
    microseconds = {}
    for rows in settings.sizes.timed_rows:
        x = settings.randn(rows, gemm.in_features)
        microseconds[f"us_of_{rows}"] = captured_microseconds(settings, [partial(each, x) for each in gemms])
    return microseconds


def timed_weights(settings: Settings, weight: torch.Tensor) -> list[torch.Tensor]:
    """Copies of a weight to multiply in turn, so no cache holds them."""
    return [weight.clone() for _ in range(min(settings.sizes.weights, -(-TIMED_BYTES // weight.nbytes)))]
