"""Proves that the products of a compiled pass give a row the same bits whatever rows are beside it."""

import torch

from specpool.engine.passes.forward_pass import CompiledProducts
from specpool.engine.passes.native.panels import BFLOAT16, PANEL
from specpool.engine.probes.inputs import ProbeInputs
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Weight, as_tensor

# More rows than two tiles of products.h have, and a number of panels that no number of threads divides evenly.
ROWS, OUTPUTS = 37, 7 * PANEL


@torch.inference_mode()
def products_agree(products: CompiledProducts) -> bool:
    """Whether the products of a row are the same bits for every number of rows beside it, at every index among them.

    With weights that are kept quantized they must also be those of the same weights in float32. All else in a compiled
    pass is computed for each row alone. The inputs cancel, so that a sum in another order shows in nearly every output.
    """
    return all(
        _product_agrees(products, kind, inputs)
        for inputs in sorted(products.product_inputs)
        for kind in products.kinds
        if kind not in QUANTIZATION_TYPES or inputs % QUANTIZATION_TYPES[kind].block == 0
    )


def _product_agrees(products: CompiledProducts, kind: str, inputs: int) -> bool:
    numbers = ProbeInputs(torch.empty(0))
    # In float32 whatever the weights are: of two bfloat16 numbers even a product that is rounded would be exact.
    order, x = numbers.order(inputs), numbers.cancelling(inputs, ROWS)
    weight: Weight
    if kind in QUANTIZATION_TYPES:
        weight = numbers.coded(QUANTIZATION_TYPES[kind], OUTPUTS, inputs)
    else:
        # Inputs are whole vectors, so that their number is even.
        half = numbers.normal(OUTPUTS, inputs // 2)
        weight = torch.cat([half, half], 1)[:, order].to(torch.bfloat16 if kind == BFLOAT16 else torch.float32)
    x = x[order].T.contiguous()
    product = products.product_with(weight)
    together = product(x)
    if kind in QUANTIZATION_TYPES:
        others = products.product_with(as_tensor(weight)), products.product_with(weight, widened_from=1)
        if not all(torch.equal(together, other(x)) for other in others):
            return False
    return all(torch.equal(product(x[-count:]), together[-count:]) for count in range(1, ROWS))
