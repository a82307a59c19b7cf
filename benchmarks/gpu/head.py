"""A random EAGLE-3 head for the target of `benchmarks.pair`, right about as often as the pair's draft.

The target's tokens follow a path, so the head needs only the last token. All queries equal the keys of their group, so
each position attends to itself. Values carry the leading features of the token's embedding into the head's state, in
place of those of the token before, and the output head maps them to the token's successors. Everything else is random.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.pair import MARGIN, add_successors
from benchmarks.shapes import SHAPES
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.config import load_config
from specpool.engine.models.stored_weights import EMBEDDING
from specpool.engine.models.weights import read_weight
from specpool.engine.weights.quantized import as_tensor

SHARPNESS = 6.0
"""Variance of the elements of a key. Attention to other positions falls exponentially with it."""
RANDOM_STATES, RANDOM_MLP = 0.1, 0.5
"""Magnitudes of the random features, relative to the leading ones."""
CARRIED = 0.64
"""Magnitude of the head's state. Scales the normalized state to subtract the previous token's leading features."""

Tensors = dict[str, torch.Tensor]


@torch.no_grad()
def save_head(
    folder: Path, target: Path, shape: str, successors: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> None:
    """Save a head for the target in another folder. `successors`: of the tokens that it can draft, [n, 2]."""
    options = EngineOptions(model=str(target))
    embeddings = as_tensor(read_weight(options, load_config(options), EMBEDDING)).to(device, torch.float32)
    sizes = SHAPES[shape]
    layers = eagle_layers(sizes["num_hidden_layers"])
    tensors = {
        **_attention(sizes, device), **_mlp(sizes, device), "fc.weight": _fc(sizes, len(layers), device),
        "lm_head.weight": _output_head(sizes, successors.to(device), embeddings),
    }  # fmt: skip
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        tensors[f"{name}.weight"] = torch.ones(sizes["hidden_size"])
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    outputs = len(tensors["lm_head.weight"])
    tensors["d2t"] = torch.zeros(outputs, dtype=torch.int64)
    folder.mkdir(exist_ok=True)
    config = {
        **sizes, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
        "draft_vocab_size": outputs, "eagle_aux_hidden_state_layer_ids": layers, "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def eagle_layers(count: int) -> list[int]:
    """The layers that EAGLE-3 reads by default, as far as a target with `count` layers has them."""
    return sorted({min(2, count), max(1, count // 2), max(1, count - 3)})


def _width(sizes: dict[str, Any]) -> int:
    """Leading features: as many as values have."""
    width: int = sizes["num_key_value_heads"] * sizes["head_dim"]
    return width


def _attention(sizes: dict[str, Any], device: torch.device) -> Tensors:
    hidden, dim, width = sizes["hidden_size"], sizes["head_dim"], _width(sizes)
    groups = sizes["num_attention_heads"] // sizes["num_key_value_heads"]
    embedded = torch.zeros(width, 2 * hidden, device=device)
    key, value = embedded.clone(), embedded
    key[:, :hidden].normal_(std=math.sqrt(SHARPNESS / hidden))
    rows = torch.arange(width, device=device)
    value[rows, rows], value[rows, hidden + rows] = 1, -CARRIED
    out = torch.zeros(hidden, groups * width, device=device)
    out[rows, rows // dim * groups * dim + rows % dim] = 1  # the first query head of each group
    query = key.unflatten(0, (-1, dim)).repeat_interleave(groups, 0).flatten(0, 1)
    parts = {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": out}
    return {f"midlayer.self_attn.{name}.weight": weight for name, weight in parts.items()}


def _mlp(sizes: dict[str, Any], device: torch.device) -> Tensors:
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    gate, up = torch.randn(2, inner, hidden, device=device) / math.sqrt(hidden)
    down = torch.randn(hidden, inner, device=device) * (RANDOM_MLP / math.sqrt(inner))
    down[: _width(sizes)] = 0
    return {f"midlayer.mlp.{name}_proj.weight": weight for name, weight in (("gate", gate), ("up", up), ("down", down))}


def _fc(sizes: dict[str, Any], layers: int, device: torch.device) -> torch.Tensor:
    hidden = sizes["hidden_size"]
    fc = torch.randn(hidden, layers * hidden, device=device) * (RANDOM_STATES / math.sqrt(layers * hidden))
    fc[: _width(sizes)] = 0
    return fc


def _output_head(sizes: dict[str, Any], successors: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Rows whose logits for the successors of a token exceed all others by the margin."""
    hidden, width, outputs = sizes["hidden_size"], _width(sizes), len(successors)
    head = torch.randn(outputs, hidden, device=embeddings.device)
    add_successors(head[:, :width].zero_(), successors, embeddings[:, :width])
    head[:, :width] *= MARGIN * math.sqrt(2 * math.log(outputs) * (hidden - width)) / width
    return head
