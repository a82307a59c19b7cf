"""Quantized checkpoints: which ones can be served, and how transformers unpacks those when it reads them."""

from typing import Any

from transformers import FineGrainedFP8Config, GgufConfig, PreTrainedConfig

INSTEAD = "serve the model without quantization instead, or as a GGUF file"
CODED = "specpool"
"""What the configuration of a trained draft calls its way to quantize."""
# Ends of the names of tensors that hold the scales of a quantized weight.
SCALES = ("scale", "scale_inv", "scales", "qscale_weight", "SCB")


def why_not_unpacked(config: PreTrainedConfig) -> str | None:
    """The reason why a model's quantized weights cannot be served; None if they can be, or if there are none."""
    found = _quantization(config)
    if found is None:
        return None
    method, kind = method_of(config), f"this {config.model_type} model is quantized"
    if method == CODED:
        return None
    if method != "fp8":
        return f"{kind} by {method}, which is not served; {INSTEAD}"
    block: Any = found.get("weight_block_size")
    if not _is_pair(block) or found.get("scale_fmt", "float") != "float" or found.get("modules_to_convert"):
        return f"{kind} by fp8 in another way than with a scale for each block of a weight; {INSTEAD}"
    # transformers would take the blocks to be smaller, and give wrong weights.
    for name, size in _sizes(config).items():
        if any(size % side for side in block):
            blocks = f"blocks of {block[0]} x {block[1]}"
            return f"{kind} by fp8 in {blocks}, but its {name} {size} is no multiple of that; {INSTEAD}"
    return None


def unpacking(config: PreTrainedConfig, source: dict[str, Any]) -> dict[str, Any]:
    """Arguments that make transformers unpack quantized weights, even for a device that could compute with them."""
    if "gguf_file" in source:
        return {"quantization_config": GgufConfig(dequantize=True)}
    if method_of(config) == "fp8":
        return {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    return {}


def method_of(config: PreTrainedConfig) -> str | None:
    """The method by which a model is quantized, as its configuration names it; None if it is not quantized."""
    found = _quantization(config)
    if found is None:
        return None
    if found.get("load_in_4bit") or found.get("load_in_8bit"):
        return "bitsandbytes"
    return str(found.get("quant_method") or "a method without a name")


def are_scales(name: str) -> bool:
    """Whether this tensor of a checkpoint belongs to a quantized weight."""
    return name.endswith(SCALES)


def _quantization(config: PreTrainedConfig) -> dict[str, Any] | None:
    for part in (config, config.get_text_config(decoder=True)):
        found: dict[str, Any] | None = getattr(part, "quantization_config", None)
        if found is not None:
            return found
    return None


def _is_pair(block: object) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) and side > 0 for side in block)


def _sizes(config: Any) -> dict[str, int]:
    """Rows and columns of the weights of a decoder's layers, by their names in the configuration."""
    sizes = {name: size for name, size in vars(config).items() if name.endswith("intermediate_size")}
    sizes["hidden_size"] = config.hidden_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes["num_attention_heads x head_dim"] = heads * head_dim
    sizes["num_key_value_heads x head_dim"] = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    return {name: size for name, size in sizes.items() if isinstance(size, int)}
