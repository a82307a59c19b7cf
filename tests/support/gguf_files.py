"""GGUF files of tiny random models in llama.cpp's format, with tensors of any type."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file
from tiny_models import save_model, small_config

from specpool.testing import byte_tokenizer

# Byte offsets of a block's scale and offset per type, and their values for weights of about 0.1.
HALVES: Mapping[str, Mapping[int, float]] = {
    "Q4_0": {0: 2e-2},
    "Q4_1": {0: 2e-2, 2: -0.15},
    "Q5_0": {0: 1e-2},
    "Q5_1": {0: 1e-2, 2: -0.15},
    "Q8_0": {0: 1.5e-3},
    "Q4_K": {0: 5e-4, 2: 4e-3},
    "Q5_K": {0: 2.5e-4, 2: 4e-3},
    "Q6_K": {208: 9e-5},
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Tensor names in transformers and in llama.cpp."""

ARCHITECTURE = "general.architecture"
Choice = Callable[[str], str | None]


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return random blocks [rows, bytes per row] of a type, with realistic scales."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at, typical in HALVES[kind].items():
        numbers = typical * rng.uniform(0.5, 1.5, (rows, columns // block, 1))
        blocks[..., at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def gguf_config(architecture: str = "llama", **changes: Any) -> Any:
    """Return a configuration that `save_gguf` supports."""
    return small_config(architecture, **{"vocab_size": 258, "hidden_size": 64, **changes})


def save_random_gguf(folder: Path, kind_of: Choice, architecture: str = "llama", **changes: Any) -> Path:
    """Save a random model. `kind_of` maps a tensor name to a type; None: float32."""
    saved = save_model(folder / "saved", gguf_config(architecture, **changes))
    return save_gguf(saved, folder / "model.gguf", kind_of)


def save_gguf(folder: Path, path: Path, kind_of: Choice = lambda name: None, **tokenizer: Any) -> Path:
    """Convert a saved model of 258 tokens like llama.cpp's converter.

    `kind_of` maps a matrix's name in transformers to its type; None: float32. Types that `gguf` cannot write get random
    blocks. `tokenizer`: changes for `byte_level_values`.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), config["model_type"])
    _write_sizes(writer, config)
    write_values(writer, byte_level_values(**tokenizer))
    for number, (key, weight) in enumerate(load_file(folder / "model.safetensors").items()):
        kind = kind_of(key) if weight.dim() == 2 else None
        name, stored = _name(key), _rotated(key, weight, config).numpy()
        if kind is None:
            writer.add_tensor(name, stored)
        else:
            number_of_kind = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantized(stored, kind, number), raw_dtype=number_of_kind)
    return finish(writer, path)


def edited_gguf(
    file: Path, path: Path, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray] = MappingProxyType({})
) -> Path:
    """Copy a GGUF file with changed keys and additional tensors: float32, or Q8_0 if their dtype is uint8.

    `keys`: keys to replace or add; None removes a key.
    """
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(str(path), str(keys.get("general.architecture", reader.fields[ARCHITECTURE].contents())))
    for key, field in reader.fields.items():
        if key not in (ARCHITECTURE, *keys) and not key.startswith("GGUF."):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for key, value in keys.items():
        if value is not None and key != ARCHITECTURE:
            element = _type_of(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, _type_of(value), element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, numbers in tensors.items():
        q8 = GGMLQuantizationType.Q8_0 if numbers.dtype == np.uint8 else None
        writer.add_tensor(name, numbers, raw_dtype=q8)
    return finish(writer, path)


def _type_of(value: Any) -> gguf.GGUFValueType:
    return gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(weight: np.ndarray, kind: str, seed: int) -> np.ndarray:
    try:
        return gguf.quants.quantize(weight, GGMLQuantizationType[kind])
    except NotImplementedError:
        return random_rows(kind, *weight.shape, seed=seed)


def _name(key: str) -> str:
    stem, _, suffix = key.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{suffix}"
    layer, stem = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[stem]}.{suffix}"


def _rotated(key: str, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Reorder the features of a Llama's heads: llama.cpp rotates neighbours, transformers the halves of a head."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(key.split(".")[-2])
    if heads is None or config["model_type"] != "llama":
        return weight
    return weight.reshape(config[heads], 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(258)


def byte_level_values(
    merges: Sequence[str] = ("Ġ t",), special: Sequence[str] = ("<eos>",), **changes: Any
) -> dict[str, Any]:
    """Return the `tokenizer.ggml` values of a byte-level vocabulary: 256 bytes, the results of merges, special tokens.

    The last token ends texts. `changes`: values by name; None removes a value.
    """
    ids = byte_tokenizer().get_vocab()
    merged = dict.fromkeys(merge.replace(" ", "", 1) for merge in merges)
    tokens = [*sorted(ids, key=ids.__getitem__)[:256], *merged, *special]
    types = [gguf.TokenType.NORMAL] * (256 + len(merged)) + [gguf.TokenType.CONTROL] * len(special)
    values = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": list(merges)}
    return {**values, "eos_token_id": len(tokens) - 1, **changes}


def sentencepiece_values(*words: str, **changes: Any) -> dict[str, Any]:
    """Return the `tokenizer.ggml` values of a SentencePiece vocabulary: three special tokens, 256 bytes, and words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(words)]
    scores = [-float(number) for number in range(len(tokens))]
    return {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, **changes}


def save_tokenizer_gguf(path: Path, values: Mapping[str, Any], **others: Any) -> Path:
    """Save a file without tensors. `values`: `tokenizer.ggml` values by name. `others`: by key, with `__` for dots."""
    writer = gguf.GGUFWriter(str(path), "llama")
    write_values(writer, values)
    for key, value in others.items():
        _write_value(writer, key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_values(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        _write_value(writer, f"tokenizer.ggml.{name}", value)


def _write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    if value is not None:
        add[type(value)](key, value)
