"""Batch-invariant mixtures of experts, for families whose experts have the standard layout of transformers.

transformers multiplies all rows at once, in kernels whose bits depend on how many rows chose each expert. Here each
expert is a pair of linear layers, which `specpool.engine.probes.batch_invariance` probes like any other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specpool.engine.numerics.tiles import Tiles
from specpool.engine.weights.quantized import QuantizedExperts, QuantizedLinear

Activate = Callable[[torch.Tensor], torch.Tensor]

ROUTER_ROWS = 16
"""Rows per router call. Routers that multiply outside linear layers cannot be probed for their tiles."""
ROUTERS = ("gate", "router")
"""Attribute names of the router beside a layer's experts."""


class Experts(nn.Module):
    """The experts of a layer, as a pair of linear layers each.

    An expert computes all rows that chose it together. Each row sums its experts in the order of its own choices.
    """

    def __init__(self, ups: nn.ModuleList, downs: nn.ModuleList, activate: Activate) -> None:
        """`activate`: maps the outputs of `ups` to the inputs of `downs`."""
        super().__init__()
        self.tiles = Tiles()
        """Tile sizes to which the rows of each expert are padded."""
        self.ups, self.downs, self.activate = ups, downs, activate

    @classmethod
    def taken_from(cls, source: Any, activate: Activate | None = None) -> "Experts":
        """Take over the weights of an experts module of transformers, so that memory never holds them twice.

        `activate`: the default is the activation of `source`.
        """
        up, own = ("gate_up_proj", source._apply_gate) if source.has_gate else ("up_proj", source.act_fn)
        return cls(_take_linears(source, up), _take_linears(source, "down_proj"), activate or own)

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's chosen experts, [rows, features].

        `hidden`: [rows, features]. `top_k_index`, `top_k_weights`: experts of each row and their weights, [rows, k].
        """
        rows, choices = top_k_index.shape
        order = top_k_index.flatten().argsort(stable=True)  # choices grouped by expert
        counts = top_k_index.flatten().bincount(minlength=len(self.ups)).tolist()
        weights = top_k_weights.reshape(-1, 1)
        dtype = torch.promote_types(hidden.dtype, weights.dtype)
        results = hidden.new_empty(rows * choices, hidden.shape[-1], dtype=dtype)
        for index, chosen in enumerate(order.split(counts)):
            if count := len(chosen):
                padded = _padded(hidden[chosen // choices], self.tiles.rows(count))
                output = self.downs[index](self.activate(self.ups[index](padded)))
                results[chosen] = output[:count] * weights[chosen]
        first, *others = results.view(rows, choices, -1).unbind(1)
        for other in others:
            first = first + other
        return first.to(hidden.dtype)


def replace_experts(module: nn.Module) -> None:
    """Replace all experts below `module`, and run routers that are not linear layers in tiles of `ROUTER_ROWS` rows."""
    for name, child in list(module.named_children()):
        if not _is_replaceable(child):
            replace_experts(child)
            continue
        setattr(module, name, Experts.taken_from(child))
        for router in (getattr(module, each, None) for each in ROUTERS):
            if router is not None and type(router) is not nn.Linear:  # linear layers are probed
                router.forward = _Tiled(router.forward)


def set_expert_tiles(module: nn.Module, tiles: Tiles) -> None:
    for child in module.modules():
        if isinstance(child, Experts):
            child.tiles = tiles


def _is_replaceable(module: Any) -> bool:
    """Whether a module has the layout that `use_experts_implementation` of transformers requires."""
    has_layout = hasattr(module, "is_transposed") and hasattr(module, "down_proj")
    return has_layout and not getattr(module, "has_post_expert_norm", False)


def _take_linears(source: Any, name: str) -> nn.ModuleList:
    """Move a parameter [experts, outputs, inputs] (or transposed) out of a module, as one linear layer per expert."""
    weights = getattr(source, name)
    if isinstance(weights, QuantizedExperts):
        delattr(source, name)
        return nn.ModuleList(QuantizedLinear([weights.of_expert(index)]) for index in range(weights.count))
    weights = weights.detach()
    biases = getattr(source, f"{name}_bias").detach() if source.has_bias else None
    for taken in (name, f"{name}_bias") if source.has_bias else (name,):
        delattr(source, taken)
    linears = nn.ModuleList()
    for index in range(len(weights)):
        weight = weights[index].T.contiguous() if source.is_transposed else weights[index]
        linear = nn.Linear(weight.shape[1], weight.shape[0], biases is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if biases is not None:
            linear.bias = nn.Parameter(biases[index], requires_grad=False)
        linears.append(linear)
    return linears


class _Tiled:
    """Calls a router in tiles of `ROUTER_ROWS` rows."""

    def __init__(self, route: Any) -> None:
        self._route = route

    def __call__(self, hidden: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        """Return the router's results for `hidden` [..., rows, features], concatenated along the rows."""
        parts = []
        for tile in hidden.split(ROUTER_ROWS, dim=-2):
            results = self._route(_padded(tile, ROUTER_ROWS), *others)
            parts.append([result[: tile.shape[-2]] for result in results])
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad `x` [..., n, features] to `rows` rows with copies of its first row."""
    missing = rows - x.shape[-2]
    if not missing:
        return x
    shape = (*x.shape[:-2], missing, x.shape[-1])
    return torch.cat([x, x[..., :1, :].expand(shape)], dim=-2)
