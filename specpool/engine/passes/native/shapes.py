"""The shapes of a fused model that the compiled pass depends on."""

from collections.abc import Iterator
from typing import Any

import torch

from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.fused_delta_net import FusedDeltaNet
from specpool.engine.passes.fused_experts import FusedExperts
from specpool.engine.passes.fused_layers import FusedLayer
from specpool.engine.passes.native.decoder import DeltaSizes, Routing

# As in decoder.c.
LANES = 16


def gemm_inputs_of(fused: FusedModel) -> set[int]:
    """Return the distinct input sizes of a model's GEMMs."""
    firsts = [each[0] for linears in _linears(fused) for each in linears.values()]
    ends = [end for end in (fused.head, fused.fc, fused.projection) if end is not None]
    return {linear.in_features for linear in (*firsts, *ends)}


def largest_intermediate(fused: FusedModel) -> int:
    """Return the intermediate size of the largest MLP for all rows; 0 without one."""
    gate_ups = [linears["gate_up"][0] for linears in _linears(fused) if "gate_up" in linears]
    return max((gate_up.out_features // 2 for gate_up in gate_ups), default=0)


def routing_of(fused: FusedModel) -> Routing:
    """Return how layers choose experts, and the shapes of the experts. All layers with experts share both."""
    mlp = next(_mixtures(fused), None)
    if mlp is None:
        return Routing()
    routing, down = mlp.routing, mlp.downs[0]
    return Routing(
        experts=len(mlp.downs),
        top_k=routing.top_k,
        groups=routing.groups,
        top_groups=routing.top_groups,
        is_sigmoid=routing.scores == "sigmoid",
        renormalizes=routing.renormalizes,
        size=down.in_features,
        scale=routing.scale,
    )


def delta_sizes_of(fused: FusedModel) -> DeltaSizes:
    """Return the sizes of a model's delta nets. All share them; the cache knows the rows of a tail."""
    net = next(delta_nets(fused), None)
    if net is None:
        return DeltaSizes()
    return DeltaSizes(net.key_heads, net.value_heads, net.key_size, net.value_size, len(net.taps))


def shape_problem(fused: FusedModel) -> str | None:
    """Say what rules out the compiled pass for this model, as a predicate; None if nothing does."""
    if fused.is_eagle_head:
        return "cannot run EAGLE heads and MTP layers"
    layers = list(attention_layers(fused))
    if not layers:
        return "needs at least one layer that attends"
    names = ("gate_up", "gate_ups")
    gate_ups = [linears[name][0] for linears in _linears(fused) for name in names if name in linears]
    # The size in the unsharded model, so all ranks agree.
    intermediate = [fused.group.full_size(gate_up.out_features // 2, "intermediate") for gate_up in gate_ups]
    sizes = [("head_dim", layers[0].head_dim), ("hidden size", fused.norm.numel())]
    sizes += [
        (f"linear_{name}_head_dim", getattr(net, f"{name}_size"))
        for net in delta_nets(fused)
        for name in ("key", "value")
    ]
    for name, size in [*sizes, *(("intermediate size", size) for size in intermediate)]:
        if size % LANES:
            return f"needs sizes that are multiples of {LANES}, and this model's {name} is {size}"
    attention = {(layer.qkv.out_features, layer.qkv.in_features, layer.out.in_features) for layer in layers}
    experts = {(mlp.routing, len(mlp.downs), mlp.downs[0].in_features) for mlp in _mixtures(fused)}
    if len(attention) > 1 or len(experts) > 1:
        return "needs layers of equal shapes, and this model's differ"
    if fused.norm.device.type != "cpu" or fused.compute_dtype not in (torch.float32, torch.bfloat16):
        return "runs only on CPUs, with float32 or bfloat16 weights"
    return None


def attention_layers(fused: FusedModel) -> Iterator[FusedLayer]:
    """Yield the layers that attend."""
    return (layer for layer in fused.layers if isinstance(layer, FusedLayer))


def delta_nets(fused: FusedModel) -> Iterator[FusedDeltaNet]:
    """Yield the layers with gated delta nets."""
    return (layer for layer in fused.layers if isinstance(layer, FusedDeltaNet))


def _linears(fused: FusedModel) -> Iterator[dict[str, list[Any]]]:
    """Yield the linear layers of each decoder layer."""
    layers: Any = fused.layers
    return (layer.linears for layer in layers)


def _mixtures(fused: FusedModel) -> Iterator[Any]:
    layers: Any = fused.layers
    return (layer.mlp for layer in layers if isinstance(layer.mlp, FusedExperts))
