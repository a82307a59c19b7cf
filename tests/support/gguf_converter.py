"""Converts saved models of all families to GGUF, as llama.cpp's convert_hf_to_gguf.py does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf_files import Choice, byte_level_values, finish, quantized, write_values
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe", "gemma3_text": "gemma3",
}  # fmt: skip
GEMMA = ("gemma", "gemma2", "gemma3_text")
NAMED_BY_PLACE = ("gemma2", "gemma3_text", "gpt_oss", "glm4_moe")
"""Families whose `post_attention_layernorm` keeps its name."""
NAMES = {
    "wte": "token_embd", "embed_tokens": "token_embd", "wpe": "position_embd", "norm": "output_norm",
    "ln_f": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "attn.c_attn": "attn_qkv", "self_attn.o_proj": "attn_output",
    "attn.c_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight", "input_layernorm": "attn_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{shared}.{kind}_proj": f"ffn_{kind}_shexp"
       for shared in ("shared_expert", "shared_experts") for kind in ("gate", "up", "down")},
}  # fmt: skip
KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys by their names in configurations."""


def convert(saved: Path, path: Path, kind_of: Choice = lambda name: None, apart: bool = False, **changes: Any) -> Path:
    """Convert a saved model of 258 tokens.

    `kind_of` maps the name of a tensor with several dimensions to its type; None: float32. `apart`: write one tensor
    per expert, as llama.cpp did until April 2024. `changes`: values by key, with `__` for dots; None removes a key.
    """
    config: Any = AutoConfig.from_pretrained(saved)
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), architecture)
    stated = {key: getattr(config, name) for name, key in KEYS.items() if getattr(config, name, None) is not None}
    keys = {**stated, **_derived(config), **{key.replace("__", "."): value for key, value in changes.items()}}
    for key, value in keys.items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
            add[type(value)](f"{architecture}.{key}", value)
    write_values(writer, byte_level_values())
    for number, (name, weight) in enumerate(tensors(model, apart)):
        kind = kind_of(name) if weight.dim() > 1 else None
        if kind is None:
            writer.add_tensor(name, weight.numpy())
        else:
            rows = quantized(weight.reshape(-1, weight.shape[-1]).numpy(), kind, number)
            writer.add_tensor(name, rows.reshape(*weight.shape[:-1], -1), raw_dtype=GGMLQuantizationType[kind])
    return finish(writer, path)


def tensors(model: Any, apart: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Return a model's tensors by their names in GGUF files."""
    config = model.config
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer, _, rest = re.sub(r"^(model|transformer)\.(layers\.|h\.)?", "", name).partition(".")
        prefix, rest = (f"blk.{layer}.", rest) if layer.isdigit() else ("", re.sub(r"^(model|transformer)\.", "", name))
        if rest.startswith("mlp.experts."):
            yield from _experts(prefix, rest.removeprefix("mlp.experts."), weight, config, apart)
            continue
        yield prefix + _named(rest, config), _converted(rest, weight, config).contiguous()


def _named(rest: str, config: Any) -> str:
    if rest in NAMES:
        return NAMES[rest]
    stem, _, suffix = rest.rpartition(".")
    if stem == "post_attention_layernorm":
        return f"{'post_attention' if config.model_type in NAMED_BY_PLACE else 'ffn'}_norm.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def _converted(rest: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    module = rest.split(".")[-2] if "." in rest else ""
    if config.model_type in GEMMA and "norm" in module:
        return weight + 1
    if config.model_type == "gpt2" and module in ("c_attn", "c_fc", "c_proj") and weight.dim() == 2:
        return weight.T
    if module == "shared_expert_gate":
        return weight[0]
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}.get(module)
    if heads and config.model_type in ("llama", "mistral", "mixtral"):
        return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    return weight


def _experts(
    prefix: str, attribute: str, weight: torch.Tensor, config: Any, apart: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    suffix = "bias" if attribute.endswith("_bias") else "weight"
    if config.model_type == "gpt_oss" and suffix == "weight":
        weight = weight.transpose(1, 2)
    parts = {"down": weight}
    if "gate_up" in attribute:
        halves = (weight[:, ::2], weight[:, 1::2]) if config.model_type == "gpt_oss" else weight.chunk(2, 1)
        parts = dict(zip(("gate", "up"), halves, strict=True))
    for kind, part in parts.items():
        if apart:
            for expert, each in enumerate(part):
                yield f"{prefix}ffn_{kind}.{expert}.{suffix}", each.contiguous()
        else:
            yield f"{prefix}ffn_{kind}_exps.{suffix}", part.contiguous()


def _derived(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    values: dict[str, Any] = {} if rope else {"feed_forward_length": config.n_inner or 4 * config.hidden_size}
    if rope:
        values = {"rope.freq_base": float(full["rope_theta"]), "attention.key_length": head_dim}
        values["rope.dimension_count"] = int(head_dim * full.get("partial_rotary_factor", 1))
    if getattr(config, "layer_types", None) or config.model_type in ("mistral", "mixtral", "phi3", "starcoder2"):
        values["attention.sliding_window"] = config.sliding_window
    if config.model_type == "glm4_moe":
        values |= {"expert_weights_norm": config.norm_topk_prob, "expert_gating_func": 2}
    if full.get("rope_type") == "yarn":
        scaling = {"type": "yarn", "factor": full["factor"]}
        scaling["original_context_length"] = full["original_max_position_embeddings"]
        values |= {f"rope.scaling.{key}": value for key, value in scaling.items()}
    return values


def split(file: Path, folder: Path, count: int, /, **changes: Any) -> list[Path]:
    """Split a GGUF file like llama-gguf-split, with the metadata in the first part. `changes`: new `split.*` values."""
    reader = gguf.GGUFReader(file)
    shares = np.array_split(np.arange(len(reader.tensors)), count)
    paths = []
    for number, share in enumerate(shares):
        path = folder / f"{file.stem}-{number + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        if number:
            writer.kv_data[0].clear()
        for key, field in reader.fields.items() if not number else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                element = field.types[-1] if field.types[1:] else None
                writer.add_key_value(key, field.contents(), field.types[0], element)
        values = {"no": number, "count": count, "tensors.count": len(reader.tensors), **changes}
        for key, value in values.items():
            writer.add_uint16(f"split.{key}", value)
        for index in share:
            tensor = reader.tensors[index]
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        paths.append(finish(writer, path))
    return paths
