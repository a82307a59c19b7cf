"""The products of both models: their error against float64, and the numbers of rows that change a row's bits."""

import torch

from benchmarks import gpu_kernels
from benchmarks.gpu_device import seconds_each
from benchmarks.gpu_part import Findings, Row, Settings
from benchmarks.shapes import SHAPES
from engine.passes.gpu.products import KINDS, Kind, Product
from engine.probes.inputs import ProbeInputs
from engine.probes.kernels import DISTINCT_OUTPUTS, TIMED_ROWS

# Rows and outputs that are compared with float64.
COMPARED = 64, 8192


def measure(settings: Settings, findings: Findings) -> None:
    """Adds a row for each shape and kind of product, those of the target first."""
    for name in dict.fromkeys((settings.target, settings.draft)):
        for what, (outputs, inputs) in product_shapes(name).items():
            case = f"{name}, {what}"
            if findings.fits(settings, f"products: {case}", 15):
                product = Product(_random(settings, outputs, inputs) * inputs**-0.5, divided=what != "head")
                probe = probe_of(product)
                x = probe_rows(product, settings.sizes.rows)
                for kind in KINDS:
                    its = {"product": case, "outputs": outputs, "inputs": inputs, "kind": kind}
                    findings.add_row("products", {**its, **measured(settings, product, probe, x, kind)})


def product_shapes(name: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the products of a model, by what they are."""
    sizes = SHAPES[name]
    hidden, middle, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden), "out": (hidden, heads * dim), "gate_up": (2 * middle, hidden),
        "down": (hidden, middle), "head": (sizes["vocab_size"], hidden),
    }  # fmt: skip


def probe_of(product: Product) -> Product:
    """A product of the same shape, of a weight that makes the sums of `probe_rows` cancel."""
    numbers, inputs, outputs = ProbeInputs(product.weight), product.in_features, product.out_features
    half = numbers.normal(min(outputs, DISTINCT_OUTPUTS), inputs // 2)
    weight = torch.cat([half, half, torch.zeros(len(half), inputs % 2).to(half)], 1)[:, _order(product)]
    return Product(weight.repeat(-(-outputs // len(half)), 1)[:outputs], divided=product.parts > 1)


def probe_rows(product: Product, count: int) -> torch.Tensor:
    """Rows [count, inputs] whose products with a probe's weight are rounding errors, which show the order of sums."""
    return ProbeInputs(product.weight).cancelling(product.in_features, count)[_order(product)].T.contiguous()


def measured(settings: Settings, product: Product, probe: Product, x: torch.Tensor, kind: Kind) -> Row:
    """What one kind makes of a product."""
    product.kind = probe.kind = kind

    def run(rows: slice) -> torch.Tensor:
        return probe(x[rows]).transpose(0, 1)  # [rows, parts, outputs]

    differs = gpu_kernels.counts_that_differ(run, run(slice(0, len(x))), gpu_kernels.row_counts(len(x)))
    rows, outputs = COMPARED
    own = _random(settings, rows, product.in_features)
    its = gpu_kernels.error(
        product(own).double().sum(0)[:, -outputs:], own.double() @ product.weight[-outputs:].double().T
    )
    times = {f"{count}_rows_us": seconds_each(lambda its=_random(settings, count, product.in_features): product(its))
             for count in TIMED_ROWS}  # fmt: skip
    return {
        "error": its, "near": its <= gpu_kernels.TOLERANCES[settings.torch_dtype], "exact": not differs,
        "differs": differs, **{name: round(seconds * 1e6, 1) for name, seconds in times.items()},
    }  # fmt: skip


def _order(product: Product) -> torch.Tensor:
    return ProbeInputs(product.weight).order(product.in_features)


def _random(settings: Settings, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=settings.device).to(settings.torch_dtype)
