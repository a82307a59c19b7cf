"""The residual branches of a layer: GEMMs of a rank's shard, and the MLP."""

from typing import Any

import torch
from torch import nn

from specpool.engine.passes.gpu.gemm import Gemm
from specpool.engine.passes.gpu.rows import Addend, activate
from specpool.engine.sharding.group import SingleRank
from specpool.engine.sharding.shares import Dimension


def gemm_of(linear: nn.Linear, outputs: Dimension, group: SingleRank) -> Gemm:
    """Return the GEMM of this rank's shard of the outputs.

    With whole sums, split-K matches the unsharded weight, so bits are the same as on one device. With sums
    in parts, each rank sends one term, rounded to the model's dtype, and the sum rounds once.
    """
    split = not (group.in_parts and outputs == "hidden")
    return Gemm(linear.weight, split, group.unsharded_outputs(len(linear.weight), outputs))


class BranchEnd(nn.Module):
    """The GEMM that ends a branch."""

    def __init__(self, linear: nn.Linear, inputs: Dimension, norm: torch.Tensor | None, group: SingleRank) -> None:
        """`norm`: weight of the branch's own norm."""
        super().__init__()
        self.group, self.inputs, self.norm = group, inputs, norm
        self.gemm = gemm_of(linear, "hidden", group)
        gathers = linear.bias is not None and not group.in_parts  # with whole sums, each rank holds a shard of the bias
        self.bias = group.gather(linear.bias.detach(), "hidden") if gathers else linear.bias

    def forward(self, x: torch.Tensor) -> Addend:
        """Return the branch. `x`: this rank's share of the inputs, [rows, features]."""
        if not self.group.in_parts or self.bias is None:
            return Addend(self.group.project_terms(self.gemm, x, self.inputs), self.bias, self.norm)
        # Only one rank holds the bias, so that rank's term includes it.
        return Addend(self.group.project_terms(lambda x: self.gemm(x).add_(self.bias), x, self.inputs), None, self.norm)


class GpuMlp(nn.Module):
    """A gated MLP."""

    def __init__(self, fused: Any, norm: torch.Tensor | None, group: SingleRank) -> None:
        """`fused`: the `FusedMlp` whose weights it takes over. `norm`: weight of the branch's own norm."""
        super().__init__()
        self.activation, self.gate_up_bias = fused.activation, fused.gate_up.bias
        self.gate_up = gemm_of(fused.gate_up, "intermediate", group)
        self.down = BranchEnd(fused.down, "intermediate", norm, group)

    def forward(self, normed: torch.Tensor) -> Addend:
        """Return the branch of normalized rows [rows, hidden]."""
        branch: Addend = self.down(activate(self.gate_up(normed), self.gate_up_bias, normed.dtype, self.activation))
        return branch
