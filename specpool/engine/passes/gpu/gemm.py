"""Products with the weights of a layer on a GPU, by a kernel in which a row has the same bits beside any other rows.

The weight is the operand for which tensor cores have one tile size, the rows are the other one, and terms are added in
one order: the shape of tiles along the weight depends on the weight alone, never on the number of rows. A weight with
few outputs is divided along its inputs too (split-K), so that enough programs read it; the caller adds up these parts,
in their order.
"""

from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.functional import linear

from specpool.engine.numerics.triton_compat import UNFUSED, is_wide, power_of_two, tl, triton

Kind = Literal["triton", "cublas"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Outputs of a tile: what an instruction of an sm_90's tensor cores multiplies.
OUTPUTS = 64
# About as many programs should read a weight as a large GPU has processors, and no part should be short.
PROGRAMS, MOST_PARTS, LEAST_INPUTS = 128, 8, 128
# Least and greatest number of rows of a tile, by whether numbers take four bytes.
ROWS = {False: (16, 256), True: (16, 32)}


class Product(nn.Module):
    """Replaces an `nn.Linear`, whose bias is left to the caller, who adds up the parts.

    `forward`: rows [n, inputs] to parts [parts, n, outputs], whose sum is the product; float32 if there are several.
    """

    def __init__(self, weight: torch.Tensor, divided: bool = True, whole: int | None = None) -> None:
        """`weight`: [outputs, inputs]. `divided`: there may be several parts. `whole`: outputs of the weight of which
        this is a rank's share, if there shall be as many parts as it would have."""
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.out_features, self.in_features = weight.shape
        self.parts = parts_of(whole or self.out_features, self.in_features) if divided else 1
        self.kind: Kind = "triton"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The parts of the product of the rows of `x` with the weight."""
        if self.kind == "cublas":
            return linear(x, self.weight)[None]
        return multiply(x, self.weight, self.parts)

    def part_bytes(self, rows: int) -> int:
        """Bytes that the parts of a product of `rows` rows take, if there are several."""
        return 0 if self.parts == 1 else self.parts * rows * self.out_features * torch.float32.itemsize


def parts_of(outputs: int, inputs: int) -> int:
    """Into how many parts a product is divided along its inputs."""
    parts = 1
    while parts < MOST_PARTS and -(-outputs // OUTPUTS) * parts < PROGRAMS and inputs % (2 * parts * LEAST_INPUTS) == 0:
        parts *= 2
    return parts


def multiply(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Parts [parts, n, outputs] of the product of rows [n, inputs] with a weight [outputs, inputs]."""
    (rows, inputs), outputs, wide = x.shape, len(weight), is_wide(x.dtype)
    tile = _tile(rows, wide)
    step = 32 if wide else 128 if tile < 64 else 64
    product = torch.empty(parts, rows, outputs, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    # Tiles of rows first: those that share a part of the weight run at the same time, and it is read once.
    _multiply[(-(-rows // tile), -(-outputs // OUTPUTS), parts)](
        x.contiguous(), weight, product, rows,
        OUT=outputs, IN=inputs, PART=-(-inputs // parts), BO=OUTPUTS, BR=tile, BK=step,
        # With fewer warps, the largest tile does not fit into registers.
        **UNFUSED, num_warps=4 if tile <= 128 else 8, num_stages=2 if wide else 4 if tile <= 128 else 3,
    )  # fmt: skip
    return product


def _tile(rows: int, wide: bool) -> int:
    """Rows of a tile: the largest that is not mostly padding at the end."""
    least, most = ROWS[wide]
    tile = min(most, max(least, power_of_two(rows)))
    return tile // 2 if tile > least and 0 < rows % tile <= tile // 2 else tile


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])
    def _multiply(
        x, weight, product, rows,
        OUT: tl.constexpr, IN: tl.constexpr, PART: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        """One part of the outputs of one tile of the weight, for one tile of rows."""
        row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
        output = tl.program_id(1).to(tl.int64) * BO + tl.arange(0, BO)
        part = tl.program_id(2)
        summed = tl.zeros([BO, BR], tl.float32)
        for at in range(part * PART, part * PART + PART, BK):
            inputs = at + tl.arange(0, BK)
            outputs_known, rows_known = (output < OUT)[:, None], (row < rows)[None, :]
            if PART % BK != 0:
                outputs_known, rows_known = outputs_known & (inputs < IN)[None, :], rows_known & (inputs < IN)[:, None]
            a = tl.load(weight + output[:, None] * IN + inputs[None, :], mask=outputs_known, other=0.0)
            b = tl.load(x + row[None, :] * IN + inputs[:, None], mask=rows_known, other=0.0)
            summed = tl.dot(a, b, summed, input_precision="ieee")
        place = product + (part * rows.to(tl.int64) + row)[None, :] * OUT + output[:, None]
        tl.store(place, summed.to(product.dtype.element_ty), mask=(output < OUT)[:, None] & (row < rows)[None, :])
