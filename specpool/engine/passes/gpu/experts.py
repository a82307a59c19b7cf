"""A mixture of experts in seven kernels, on passes of any shape: the host never learns which experts rows chose."""

from typing import Any

import torch
from torch import nn

from specpool.engine.passes.gpu.branches import GpuMlp
from specpool.engine.passes.gpu.gemm import MAX_SPLIT_K, MIN_SPLIT_INPUTS, split_k_gemm
from specpool.engine.passes.gpu.grouped_gemm import GroupedGemm, group_choices
from specpool.engine.passes.gpu.routing import choose_experts, combine
from specpool.engine.passes.gpu.rows import Addend, activate
from specpool.engine.sharding.group import SingleRank


class GpuExperts(nn.Module):
    """The experts of a layer, and the MLP that all rows share."""

    def __init__(self, fused: Any, norm: torch.Tensor | None, group: SingleRank) -> None:
        """`fused`: the `FusedExperts` whose weights it takes over. `norm`: weight of the branch's own norm."""
        super().__init__()
        self.routing, self.activation, self.correction, self.norm = (
            fused.routing, fused.activation, fused.correction, norm,
        )  # fmt: skip
        weight, self.router_bias = fused.router.weight, fused.router.bias
        self.is_gated = fused.shared_gate is not None
        if self.is_gated:
            weight = torch.cat([weight, fused.shared_gate.weight])
        self.router = nn.Parameter(weight, requires_grad=False)
        """Weight of the router, followed by the one output of the gate of the shared MLP, if it has one."""
        # A router has too few outputs to occupy the GPU, so it is split even where splits differ in size.
        self.router_splits: int = max(1, min(MAX_SPLIT_K, fused.router.in_features // MIN_SPLIT_INPUTS))
        self.gate_up, self.down = (_grouped(linears, self.routing.top_k) for linears in (fused.gate_ups, fused.downs))
        self.shared = None if fused.shared is None else GpuMlp(fused.shared, None, group)

    def forward(self, normed: torch.Tensor, slots: torch.Tensor) -> Addend:
        """Return the branch of normalized rows [rows, hidden]. `slots`: [rows]; -1: the row is padding."""
        # Logits stay in float32: rounding would create ties.
        logits = split_k_gemm(normed, self.router, self.router_splits, torch.float32)
        experts = self.gate_up.experts
        chosen, weights = choose_experts(logits, self.router_bias, self.correction, slots, self.routing, experts)
        groups = group_choices(chosen, experts, self.gate_up.tile(chosen.numel(), normed).rows)
        gate_up = self.gate_up(normed, groups, choices_per_row=self.routing.top_k)
        activated = activate(gate_up, None, normed.dtype, self.activation)
        outputs = self.down(activated, groups, choices_per_row=1)
        shared = None if self.shared is None else self.shared(normed)
        gates = logits if self.is_gated else None
        return Addend(combine(outputs, chosen, weights, shared, gates), None, self.norm)

    def scratch_bytes(self, rows: int) -> int:
        """Bytes of the intermediate results of `rows` rows, excluding the shared MLP."""
        choices, dtype = rows * self.routing.top_k, self.gate_up.weight.dtype
        results: int = self.gate_up.scratch_bytes(choices, dtype) + self.down.scratch_bytes(choices, dtype)
        activated: int = choices * self.down.in_features * dtype.itemsize
        sums: int = rows * (self.router_splits * len(self.router) + self.down.out_features)  # logits, and the branch
        return results + activated + sums * torch.float32.itemsize


def _grouped(linears: Any, top_k: int) -> GroupedGemm:
    """Return the GEMM of one linear layer per expert."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weight = torch.stack([linear.weight.detach() for linear in linears])
    return GroupedGemm(weight, torch.stack(biases).detach() if biases else None, top_k)
