"""Runs a model without weights, so that unsupported kinds of attention are refused before a download."""

import logging
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from specpool.engine.config.architectures import RECURRENT_LAYERS
from specpool.engine.config.sources import first_line
from specpool.engine.passes.attention import why_not_packed
from specpool.engine.passes.families import window_of
from specpool.engine.sharding.shares import head_dim_of

DRY_RUN = "specpool_dry_run"
# Models with more layers would take seconds to build.
MAX_LAYERS = 256
TOKENS = 8
FOREIGN = "attention outside transformers' attention interface"


# It recommends kernels for transformers' recurrent layers, which run only in checks.
logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


class UnsupportedAttentionError(Exception):
    """A layer has a kind of attention that packed batches do not support. The message names it."""


class _Calls(Counter[int]):
    """Counts attention calls by layer. Raises UnsupportedAttentionError for unsupported calls."""

    def __init__(self, kv_heads: int, head_dim: int, windows: Mapping[int, int]) -> None:
        """`windows`: by layer, the sliding windows that are shorter than the longest sequence."""
        super().__init__()
        self._windows = windows
        # The cache copies a single KV head to all of its heads, and zero-pads smaller heads.
        self._kv_heads, self._head_dim = (1, kv_heads), head_dim

    def record(self, module: Any, key: torch.Tensor, value: torch.Tensor, mask: object, features: Any) -> None:
        reason = why_not_packed(module, mask, features)
        if reason is None and any(
            each.shape[1] not in self._kv_heads or each.shape[-1] > self._head_dim for each in (key, value)
        ):
            reason = "key and value heads whose number or size differs from its configuration"
        window = self._windows.get(module.layer_idx)
        if reason is None and window is not None and features.get("sliding_window") != window:
            reason = f"a sliding window of {window} positions that its attention ignores (try --max-model-len {window})"
        if reason is not None:
            raise UnsupportedAttentionError(reason)
        self[module.layer_idx] += 1


@torch.inference_mode()
def unsupported_attention(config: PreTrainedConfig, max_model_len: int) -> str | None:
    """Return the kind of attention that packed batches do not support; None if there is none, or only weights can tell.

    Builds and runs the model on the meta device, which takes no memory. `max_model_len`: maximum positions of a
    sequence.
    """
    sizes: Any = config
    layers, heads = sizes.num_hidden_layers, sizes.num_attention_heads
    if layers > MAX_LAYERS:
        return None
    window, types = window_of(config), getattr(sizes, "layer_types", None) or ["sliding_attention"] * layers
    sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    windows = dict.fromkeys(sliding, window) if window is not None and window < max_model_len else {}
    calls = _Calls(getattr(sizes, "num_key_value_heads", None) or heads, head_dim_of(config), windows)
    try:
        with torch.device("meta"):
            # Building a model changes its configuration. Other implementations of experts read tensor values, which the
            # meta device lacks.
            model: Any = AutoModelForCausalLM.from_config(
                deepcopy(config), attn_implementation=DRY_RUN, experts_implementation="batched_mm"
            )
            model.eval()(
                input_ids=torch.zeros(1, TOKENS, dtype=torch.long),
                position_ids=torch.arange(TOKENS)[None],
                use_cache=False,
                packed_batch=calls,
            )
    except UnsupportedAttentionError as error:
        return str(error)
    except Exception as error:  # model code may raise anything; loading the model reports it
        if "broadcast" in str(error):
            return f"inconsistent sizes in its configuration ({first_line(error)})"
        return FOREIGN if isinstance(error, KeyError) and error.args == (DRY_RUN,) else None
    if not calls:
        return FOREIGN
    recurrent = {layer for layer, kind in enumerate(types) if kind == RECURRENT_LAYERS.get(config.model_type)}
    if calls != Counter({*range(layers)} - recurrent):
        return "layers that run attention several times or not at all"
    return None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    packed_batch: _Calls | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    if packed_batch is None:
        raise UnsupportedAttentionError(FOREIGN)
    packed_batch.record(module, key, value, attention_mask, features)
    return query.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None


AttentionInterface.register(DRY_RUN, _attend)
