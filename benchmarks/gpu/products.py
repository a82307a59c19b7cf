"""The products of both models: error against float64, numbers of rows that change a row's bits, and microseconds."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.device import seconds_each
from benchmarks.gpu.part import Findings, Row, Settings
from benchmarks.shapes import SHAPES
from specpool.engine.passes.gpu.gemm import KINDS, Product
from specpool.engine.passes.gpu.graphs import CudaGraphs
from specpool.engine.probes.inputs import ProbeInputs

# Seconds without which a shape is not begun.
LONGEST_CHECK = 15
# Rows and outputs that are compared with float64.
COMPARED = 64, 8192
# Bytes of different weights that are multiplied in turn to be timed, so that no cache holds them.
TIMED_BYTES = 2**28


def measure(settings: Settings, findings: Findings) -> None:
    """Adds a row for each shape and kind of product, those of the target first."""
    for name in dict.fromkeys((settings.target, settings.draft)):
        for what, (outputs, inputs) in product_shapes(name).items():
            checks = partial(add_rows, settings, findings, f"{name}, {what}", outputs, inputs, what != "head")
            findings.attempt(settings, f"products: {name}, {what}", LONGEST_CHECK, checks)


def add_rows(settings: Settings, findings: Findings, case: str, outputs: int, inputs: int, divided: bool) -> None:
    """Adds the rows of a shape: what each kind makes of a product, and whether its bits are those of the first kind."""
    product = Product(_random(settings, outputs, inputs) * inputs**-0.5, divided)
    weight, x = ProbeInputs(product.weight).product(outputs, inputs, settings.sizes.rows)
    probe = Product(weight, divided)
    first: torch.Tensor | None = None
    for kind in KINDS:
        product.kind = probe.kind = kind
        bits = probe(x[: COMPARED[0]].clone()).float().sum(0).to(x.dtype)
        first = bits if first is None else first
        its = {"product": case, "outputs": outputs, "inputs": inputs, "kind": kind, "parts": product.parts}
        alike = {f"as_{KINDS[0]}": torch.equal(bits, first)}
        findings.add_row("products", {**its, **measured(settings, product, probe, x), **alike})


def product_shapes(name: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the products of a model, by what they are."""
    sizes = SHAPES[name]
    hidden, middle, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden), "out": (hidden, heads * dim), "gate_up": (2 * middle, hidden),
        "down": (hidden, middle), "head": (sizes["vocab_size"], hidden),
    }  # fmt: skip


def measured(settings: Settings, product: Product, probe: Product, x: torch.Tensor) -> Row:
    """What the kind that a product has makes of it. `x`: rows for the probe of its shape."""

    def run(rows: slice) -> torch.Tensor:
        parts: torch.Tensor = probe(x[rows].clone())  # aligned as in a pass
        return parts.transpose(0, 1)  # [rows, parts, outputs]

    differs = kernels.counts_that_differ(run, run(slice(0, len(x))), kernels.row_counts(len(x)))
    rows, outputs = COMPARED
    own = _random(settings, rows, product.in_features)
    expected = own.double() @ product.weight[-outputs:].double().T
    its = kernels.error(product(own).double().sum(0)[:, -outputs:], expected)
    return {
        "error": its, "near": its <= kernels.TOLERANCES[settings.torch_dtype], "exact": not differs,
        "differs": differs, **microseconds(settings, product),
    }  # fmt: skip


def microseconds(settings: Settings, product: Product) -> dict[str, float]:
    """The time of a product by its rows, recorded as in a pass."""
    copies = min(settings.sizes.weights, -(-TIMED_BYTES // product.weight.nbytes))
    products = [Product(product.weight.clone(), divided=product.parts > 1) for _ in range(copies)]
    found = {}
    record = None if product.weight.device.type == "cpu" else CudaGraphs()
    for each in products:
        each.kind = product.kind
    for rows in settings.sizes.timed_rows:
        x = _random(settings, rows, product.in_features)

        def run(x: torch.Tensor = x) -> torch.Tensor:
            results: list[torch.Tensor] = [each(x) for each in products]
            return results[-1]

        run()  # compiles
        again: Callable[[], object] = run if record is None else record(run)[0]
        found[f"us_of_{rows}"] = round(seconds_each(settings, again) / copies * 1e6, 1)
    return found


def _random(settings: Settings, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=settings.device).to(settings.torch_dtype)
