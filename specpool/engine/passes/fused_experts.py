"""Mixtures of experts in the fused pass: the weights that all fast passes read, and the torch operations."""

from functools import partial
from typing import Any

import torch
from torch import nn

from specpool.engine.passes.experts import ROUTERS, Experts
from specpool.engine.passes.kinds import TINY, Activation, Routing
from specpool.engine.passes.modules import activated, in_chunks
from specpool.engine.weights.quantized import dequantized_linear, linear_of


class FusedExperts(nn.Module):
    """A router, its experts, and a gated MLP that all rows share, if the family has one.

    The shared MLP may have a gate: a linear layer whose sigmoid multiplies its result.
    """

    def __init__(self, block: Any, activation: Activation, shared: Any) -> None:
        """`block`: a transformers module with a router beside its experts. The module cannot run afterwards.

        `shared`: a `FusedMlp` for all rows, or None.
        """
        super().__init__()
        router = next(getattr(block, name) for name in ROUTERS if hasattr(block, name))
        self.router = linear_of(router.weight, getattr(router, "bias", None))
        self.routing, self.activation = _routing_of(router), activation
        correction = getattr(router, "e_score_correction_bias", None)
        self.correction = None if correction is None else correction.detach().float()
        """Added to the scores [experts] that choose experts, but not to weights; None: nothing is added."""
        is_interleaved = activation.limit is not None
        self.experts = Experts.taken_from(block.experts, partial(activated, activation=activation))
        if is_interleaved:
            for index, up in enumerate(self.experts.ups):
                self.experts.ups[index] = _separated(up)
        self.shared = shared
        gate = getattr(block, "shared_expert_gate", None)
        self.shared_gate = None if gate is None else linear_of(gate.weight, None)

    @property
    def gate_ups(self) -> nn.ModuleList:
        """A linear layer [2 * size, hidden] for each expert: gate, then up."""
        return self.experts.ups

    @property
    def downs(self) -> nn.ModuleList:
        """A linear layer [hidden, size] for each expert."""
        return self.experts.downs

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the branch [rows, hidden] of normalized rows."""
        chosen, weights = choose_experts(self.router(normed).float(), self.routing, self.correction)
        branch: torch.Tensor = self.experts(normed, chosen, weights)
        if self.shared is None:
            return branch
        shared: torch.Tensor = self.shared(normed)
        if self.shared_gate is not None:
            shared = in_chunks(torch.sigmoid, self.shared_gate(normed)) * shared
        return branch + shared

    def dequantize(self) -> None:
        """Dequantize all weights."""
        for linears in (self.gate_ups, self.downs):
            for index, layer in enumerate(linears):
                linears[index] = dequantized_linear(layer)
        if self.shared is not None:
            self.shared.dequantize()


def choose_experts(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each row and their weights, both [rows, top_k], from logits [rows, experts].

    `correction`: added to the scores that choose experts, [experts].
    """
    scores = logits.softmax(-1) if routing.scores == "softmax" else in_chunks(torch.sigmoid, logits)
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        groups = ranked.view(len(ranked), routing.groups, -1)
        best = _top(groups.topk(routing.ranked_by).values.sum(-1), routing.top_groups)
        hidden = torch.ones(groups.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, value=False)
        ranked = groups.masked_fill(hidden[..., None], -torch.inf).flatten(1)
    chosen = _top(ranked, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.renormalizes:
        total = weights[:, :1]
        for index in range(1, routing.top_k):
            total = total + weights[:, index : index + 1]
        weights = weights / (total + routing.epsilon)
    return chosen, weights * routing.scale


def _top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indexes of the highest scores of each row, in descending order; the lower index wins ties."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _routing_of(router: Any) -> Routing:
    method = getattr(router, "topk_method", None)  # of DeepSeek V2
    has_groups = method != "greedy" and hasattr(router, "num_group")
    groups, top_groups = (router.num_group, router.topk_group) if has_groups else (1, 1)
    return Routing(
        router.top_k,
        "sigmoid" if hasattr(router, "e_score_correction_bias") else "softmax",
        getattr(router, "norm_topk_prob", method is None),
        getattr(router, "routed_scaling_factor", 1.0),
        groups,
        top_groups,
        2 if method is None else 1,
        getattr(router, "epsilon", TINY),
    )


def _separated(up: Any) -> nn.Linear:
    """Return the layer with all gate rows before all up rows, given a layer that interleaves them."""
    bias = None if up.bias is None else torch.cat([up.bias[0::2], up.bias[1::2]])
    return linear_of(torch.cat([up.weight[0::2], up.weight[1::2]]), bias)
