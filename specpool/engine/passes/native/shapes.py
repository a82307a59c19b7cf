"""The shapes of a fused model that the compiled pass depends on."""

from collections.abc import Iterator
from math import gcd
from typing import Any

import torch

from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.fused_delta_net import FusedDeltaNet
from specpool.engine.passes.fused_experts import FusedExperts
from specpool.engine.passes.fused_kimi import FusedKimiDeltaNet
from specpool.engine.passes.fused_latent import FusedLatentLayer
from specpool.engine.passes.fused_layers import FusedLayer
from specpool.engine.passes.fused_recurrent import RecurrentLayer
from specpool.engine.passes.native.decoder import LatentSizes, RecurrenceSizes, Routing
from specpool.engine.passes.native.panels import PANEL

# As in decoder.c.
LANES = 16
LATENT_BLOCK = 8
"""Maximum number of query heads that a thread attends with at a time to latent vectors, which all heads share."""


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
        ranked_by=routing.ranked_by,
        is_sigmoid=routing.scores == "sigmoid",
        renormalizes=routing.renormalizes,
        size=down.in_features,
        scale=routing.scale,
        epsilon=routing.epsilon,
    )


def recurrence_sizes_of(fused: FusedModel) -> RecurrenceSizes:
    """Return the sizes of a model's recurrent layers. All share them; the cache knows the rows of a tail."""
    layer = next((layer for layer in fused.layers if isinstance(layer, RecurrentLayer)), None)
    if layer is None:
        return RecurrenceSizes()
    taps, features = layer.taps.shape
    if not isinstance(layer, FusedDeltaNet):
        return RecurrenceSizes(taps=taps, features=features)
    return RecurrenceSizes(layer.key_heads, layer.value_heads, layer.key_size, layer.value_size, taps, features)


def latent_sizes_of(layer: FusedLayer | FusedLatentLayer) -> LatentSizes:
    """Return the sizes of an attending layer's heads with latent attention. All layers share them."""
    if isinstance(layer, FusedLayer):
        return LatentSizes()
    return LatentSizes(layer.key_dim, layer.rotary_dim, layer.value_dim, layer.latent_eps)


def latent_floats(layer: FusedLayer | FusedLatentLayer) -> int:
    """Return the activations of a row, in floats, that only latent attention has."""
    if isinstance(layer, FusedLayer):
        return 0
    queries = 0 if layer.query_up is None else layer.query_up.in_features + layer.query_up.out_features
    floats: int = queries + layer.heads * (layer.key_dim + layer.head_dim + layer.rank)
    return floats


def query_groups(layer: FusedLayer | FusedLatentLayer) -> int:
    """Return the number of query heads that a thread attends with at a time, to the same keys."""
    return layer.heads // layer.kv_heads if isinstance(layer, FusedLayer) else gcd(layer.heads, LATENT_BLOCK)


def shape_problem(fused: FusedModel) -> str | None:
    """Say what rules out the compiled pass for this model, as a predicate; None if nothing does."""
    if fused.is_eagle_head:
        return "cannot run the layers of EAGLE heads"
    if any(isinstance(layer, FusedKimiDeltaNet) for layer in fused.layers):
        return "cannot run Kimi Delta Attention"
    layers = list(attention_layers(fused))
    names = ("gate_up", "gate_ups")
    gate_ups = [linears[name][0] for linears in _linears(fused) for name in names if name in linears]
    # The size in the unsharded model, so all ranks agree.
    intermediate = [fused.group.full_size(gate_up.out_features // 2, "intermediate") for gate_up in gate_ups]
    sizes = [("head_dim", layers[0].head_dim), ("hidden size", fused.norm.numel())]
    sizes += [
        (f"linear_{name}_head_dim", getattr(net, f"{name}_size"))
        for net in fused.layers
        if isinstance(net, FusedDeltaNet)
        for name in ("key", "value")
    ]
    for name, size in [*sizes, *(("intermediate size", size) for size in intermediate)]:
        if size % LANES:
            return f"needs sizes that are multiples of {LANES}, and this model's {name} is {size}"
    for layer in layers:
        if isinstance(layer, FusedLatentLayer) and (problem := _latent_problem(layer)) is not None:
            return problem
    attention = {
        tuple((linears[0].out_features, linears[0].in_features) for linears in layer.mixer.values()) for layer in layers
    }
    experts = {(mlp.routing, len(mlp.downs), mlp.downs[0].in_features) for mlp in _mixtures(fused)}
    if len(attention) > 1 or len(experts) > 1:
        return "needs layers of equal shapes, and this model's differ"
    if fused.norm.device.type != "cpu" or fused.compute_dtype not in (torch.float32, torch.bfloat16):
        return "runs only on CPUs, with float32 or bfloat16 weights"
    return None


def _latent_problem(layer: FusedLatentLayer) -> str | None:
    sizes = [("kv_lora_rank", layer.rank, PANEL), ("v_head_dim", layer.value_dim, PANEL)]
    if layer.query_up is not None:
        sizes.append(("q_lora_rank", layer.query_up.in_features, LANES))
    for name, size, unit in sizes:
        if size % unit:
            return f"needs a {name} that is a multiple of {unit}, and this model's is {size}"
    return None


def attention_layers(fused: FusedModel) -> Iterator[FusedLayer | FusedLatentLayer]:
    """Yield the layers that attend."""
    return (layer for layer in fused.layers if isinstance(layer, FusedLayer | FusedLatentLayer))


def _linears(fused: FusedModel) -> Iterator[dict[str, list[Any]]]:
    """Yield the linear layers of each decoder layer."""
    layers: Any = fused.layers
    return (layer.linears for layer in layers)


def _mixtures(fused: FusedModel) -> Iterator[Any]:
    layers: Any = fused.layers
    return (layer.mlp for layer in layers if isinstance(layer.mlp, FusedExperts))
