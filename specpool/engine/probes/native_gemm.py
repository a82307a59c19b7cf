"""Proves that the GEMMs of a compiled pass are batch-invariant."""

import torch

from specpool.engine.config.options import INT8
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.passes.native.panels import BFLOAT16, PANEL, PART
from specpool.engine.probes.inputs import ProbeInputs
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Weight, as_tensor

# More rows than two tiles of gemm.h, and a number of panels that few thread counts divide evenly.
ROWS, OUTPUTS = 37, 7 * PANEL
SLACK = 1.01
"""Tolerance for the rounding of scales and sums in float32."""


@torch.inference_mode()
def gemms_agree(model: NativeModel) -> bool:
    """Whether a row has the same bits for every number of rows and at every index.

    Quantized weights must also give the bits of the same weights in float32, or with int8 activations, results within
    the rounding error. Everything else in a compiled pass works on one row alone. The inputs cancel, so another
    order of summation changes nearly every output.
    """
    return all(
        _gemm_agrees(model, kind, inputs)
        for inputs in sorted(model.gemm_inputs)
        for kind in model.kinds
        if kind not in QUANTIZATION_TYPES or inputs % QUANTIZATION_TYPES[kind].block == 0
    )


def _gemm_agrees(model: NativeModel, kind: str, inputs: int) -> bool:
    numbers = ProbeInputs(torch.empty(0))
    # Rows are float32 whatever the weights are: the product of two bfloat16 numbers never rounds.
    order, x = numbers.order(inputs), numbers.cancelling(inputs, ROWS)
    weight: Weight
    if kind in QUANTIZATION_TYPES:
        weight = numbers.quantized(QUANTIZATION_TYPES[kind], OUTPUTS, inputs)
    else:
        half = numbers.normal(OUTPUTS, inputs // 2)  # `inputs` is a multiple of a vector, so even
        weight = torch.cat([half, half], 1)[:, order].to(torch.bfloat16 if kind == BFLOAT16 else torch.float32)
    x = x[order].T.contiguous()
    gemm = model.gemm_with(weight)
    together = gemm(x)
    if kind in QUANTIZATION_TYPES:
        if not torch.equal(together, model.gemm_with(weight, widened_from=1)(x)):
            return False
        if model.activations == INT8 and inputs % PART == 0:
            if not _is_rounding(together, x, as_tensor(weight)):
                return False
        elif not torch.equal(together, model.gemm_with(as_tensor(weight))(x)):
            return False
    return all(torch.equal(gemm(x[-count:]), together[-count:]) for count in range(1, ROWS))


def _is_rounding(results: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether results [n, outputs] are within the error of inputs [n, inputs] rounded to int8.

    Each input is off by at most half a step. A step is a 127th of the largest magnitude in its part.
    """
    exact = x.double() @ weight.double().T
    half_steps = x.double().unflatten(1, (-1, PART)).abs().amax(2) / 254
    bound = half_steps.repeat_interleave(PART, 1) @ weight.double().abs().T
    return bool(((results - exact).abs() <= SLACK * bound).all())
