"""The shapes of a fused model, as far as the compiled pass depends on them."""

from collections.abc import Iterator
from typing import Any

import torch

from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.fused_experts import FusedExperts
from specpool.engine.passes.native.decoder import Routing

# As in decoder.c.
LANES = 16


def gemm_inputs_of(fused: FusedModel) -> set[int]:
    """The distinct input sizes of a model's GEMMs."""
    linears = [linears[0] for layer in _layers(fused) for linears in layer.linears.values()]
    ends = [end for end in (fused.head, fused.fc, fused.projection) if end is not None]
    return {linear.in_features for linear in (*linears, *ends)}


def largest_intermediate(fused: FusedModel) -> int:
    """The intermediate size of the largest MLP for all rows; 0 without one."""
    return max((layer.linears["down"][0].in_features for layer in _layers(fused) if "down" in layer.linears), default=0)


def routing_of(fused: FusedModel) -> Routing:
    """How layers choose experts, and the shapes of the experts, which all layers with experts share."""
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


def shape_problem(fused: FusedModel) -> str | None:
    """Say what rules out the compiled pass for this model, as a predicate; None if nothing does."""
    if fused.is_eagle_head:
        return "cannot run the layers of EAGLE heads"
    layers = list(_layers(fused))
    downs = [layer.linears[name][0] for layer in layers for name in ("down", "downs") if name in layer.linears]
    # The size in the unsharded model, so all ranks agree.
    intermediate = {fused.group.full_size(down.in_features, "intermediate") for down in downs}
    sizes = [("head_dim", layers[0].head_dim), ("hidden size", fused.norm.numel())]
    for name, size in [*sizes, *(("intermediate size", size) for size in sorted(intermediate))]:
        if size % LANES:
            return f"needs sizes that are multiples of {LANES}, and this model's {name} is {size}"
    attention = {(layer.qkv.out_features, layer.qkv.in_features, layer.out.in_features) for layer in layers}
    experts = {(mlp.routing, len(mlp.downs), mlp.downs[0].in_features) for mlp in _mixtures(fused)}
    if len(attention) > 1 or len(experts) > 1:
        return "needs layers of equal shapes, and this model's differ"
    if fused.norm.device.type != "cpu" or fused.compute_dtype not in (torch.float32, torch.bfloat16):
        return "runs only on CPUs, with float32 or bfloat16 weights"
    return None


def _layers(fused: FusedModel) -> Iterator[Any]:
    yield from fused.layers


def _mixtures(fused: FusedModel) -> Iterator[Any]:
    return (layer.mlp for layer in _layers(fused) if isinstance(layer.mlp, FusedExperts))
