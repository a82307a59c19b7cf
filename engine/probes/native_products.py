"""Proves that the products of a compiled pass give a row the same bits whatever rows are beside it."""

import torch

from engine.passes.forward_pass import CompiledProducts
from engine.passes.native.model import PANEL
from engine.probes.inputs import ProbeInputs

# More rows than two tiles of decoder.c have, and a number of panels that no number of threads divides evenly.
ROWS, OUTPUTS = 37, 7 * PANEL


@torch.inference_mode()
def products_agree(products: CompiledProducts) -> bool:
    """Whether the products of a row are the same bits for every number of rows beside it, at every index among them.

    All else in a compiled pass is computed for each row alone. The inputs cancel, so that a sum in another order shows
    in nearly every output.
    """
    return all(_product_agrees(products, inputs) for inputs in sorted(products.product_inputs))


def _product_agrees(products: CompiledProducts, inputs: int) -> bool:
    numbers = ProbeInputs(torch.empty(0, dtype=products.weight_dtype))
    order, half = numbers.order(inputs), numbers.normal(OUTPUTS, inputs // 2)
    # Inputs are whole vectors, so that their number is even.
    product = products.product_with(torch.cat([half, half], 1)[:, order])
    # In float32 whatever the weights are: of two bfloat16 numbers even a product that is rounded would be exact.
    x = ProbeInputs(torch.empty(0)).cancelling(inputs, ROWS)[order].T.contiguous()
    together = product(x)
    return all(torch.equal(product(x[-count:]), together[-count:]) for count in range(1, ROWS))
