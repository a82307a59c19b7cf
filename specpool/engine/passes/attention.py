"""Packed attention over the KV cache, for any transformers model through its attention registry."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import sqrt
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from specpool.engine.passes.attention_plan import AttentionCall
from specpool.engine.passes.experts import replace_experts
from specpool.engine.passes.explicit_attention import attend_explicitly
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.kinds import FULL_ATTENTION, AttentionKind
from specpool.engine.passes.modules import ChunkedFunctions
from specpool.engine.passes.packing import PackedBatch

PACKED_ATTENTION = "specpool_packed"

# Attention features that packed batches do not support, by the argument that requests them.
_FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "sinks": "token-dependent attention sinks",
        "position_bias": "position biases",
    }
)


def why_not_packed(module: torch.nn.Module, attention_mask: object, features: Mapping[str, Any]) -> str | None:
    """Return the feature of this attention call that packed batches do not support; None if there is none."""
    if attention_mask is not None:
        return "custom attention masks"
    if not getattr(module, "is_causal", True):
        return "bidirectional attention, like an encoder"
    return next((feature for name, feature in _FEATURES.items() if features.get(name) is not None), None)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, rows, dim]
    key: torch.Tensor,  # [1, kv_heads, rows, dim]
    value: torch.Tensor,  # [1, kv_heads, rows, dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed_batch: PackedBatch | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Cache the new tokens' keys and values, then attend. Return [1, rows, heads, dim].

    The signature is that of transformers' attention functions.
    """
    assert packed_batch is not None, f"{type(module).__name__} does not pass keyword arguments on to attention"
    reason = why_not_packed(module, attention_mask, features)
    if reason is not None:
        raise NotImplementedError(f"it has {reason}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    size, width = packed_batch.arena.keys[layer].shape[-1], value.shape[-1]
    if scaling is None:
        scaling = 1 / sqrt(query.shape[-1])
    # Zero-pad heads smaller than those of the cache, such as the values of latent attention.
    query, key, value = (pad(each[0].transpose(0, 1), (0, size - each.shape[-1])) for each in (query, key, value))
    kind = AttentionKind(features.get("sliding_window"), features.get("s_aux"), features.get("softcap"))
    return attend(packed_batch, layer, query, key, value, scaling, kind)[None, ..., :width], None


def attend(
    batch: PackedBatch,
    layer: int,
    query: torch.Tensor,  # [rows, heads, dim]
    key: torch.Tensor,  # [rows, kv_heads, dim]
    value: torch.Tensor | None,  # [rows, kv_heads, dim]; None: keys are values, too
    scaling: float,
    kind: AttentionKind = FULL_ATTENTION,
) -> torch.Tensor:
    """Cache the new tokens' keys and values, then attend. Return [rows, heads, dim]."""
    arena, plan = batch.arena, batch.attention
    assert plan is not None
    arena.write(layer, plan.columns, key, value)
    values = None if value is None else arena.values[layer]
    results = [_attend(call, query, arena.keys[layer], values, scaling, kind) for call in plan.calls]
    return torch.cat(results)[plan.result_rows]


def _attend(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    scaling: float,
    kind: AttentionKind,
) -> torch.Tensor:
    """The result of one call, [B * Q, heads, dim]."""
    _, heads, dim = query.shape
    kv_heads = len(keys)
    batch, length = call.query_index.shape
    # Fold the query heads that share a KV head into its query rows, so no key is copied.
    q = query[call.query_index].transpose(1, 2)  # [B, heads, Q, dim]
    q = q.reshape(batch, kv_heads, heads // kv_heads * length, dim)
    k = call.attended(keys)
    v = k if values is None else call.attended(values)
    mask = call.visible(kind.window)
    if kind.sinks is None and kind.softcap is None:
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    else:
        sinks = query.new_full((heads,), -torch.inf) if kind.sinks is None else kind.sinks
        sinks = sinks.view(kv_heads, -1, 1).expand(batch, -1, -1, length).flatten(2).float()  # [B, kv_heads, rows]
        if mask is None:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
        visible = mask.expand(batch, 1, q.shape[2], call.kv_length)
        attended = attend_explicitly(q, k, v, visible, scaling, sinks, kind.softcap)
    return attended.reshape(batch, heads, length, dim).transpose(1, 2).reshape(batch * length, heads, dim)


class LibraryModel(ForwardPass):
    """Runs packed batches through the modules of transformers, with their experts replaced (see `experts.py`)."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.compute_dtype = model, model.dtype
        self._layers = _decoder_layers(model)
        replace_experts(model)

    @property
    def has_states(self) -> bool:
        """Whether the decoder layers are known."""
        return bool(self._layers)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the requested rows, padding included."""
        with self._recording(batch), ChunkedFunctions():
            output = self.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                packed_batch=batch,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    @contextmanager
    def _recording(self, batch: PackedBatch) -> Iterator[None]:
        """Record the states of the batch. `output_hidden_states` would normalize the last ones."""

        def hook(num_layers: int) -> Callable[..., None]:
            return lambda _module, _inputs, output: batch.record_states(
                num_layers, (output[0] if isinstance(output, tuple) else output)[0]
            )

        with ExitStack() as hooks:
            for num_layers in batch.state_layers:
                hooks.enter_context(self._layers[num_layers - 1].register_forward_hook(hook(num_layers)))
            yield


def _decoder_layers(model: PreTrainedModel) -> Sequence[torch.nn.Module]:
    """The decoder layers of a model; empty if they are not in one list."""
    lists = (list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return next((layers for layers in lists if len(layers) == model.config.num_hidden_layers), [])


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, lambda *_, **__: None)  # the packed batch holds the masks
