"""Saves random vision-language checkpoints, as transformers does."""

import re
from pathlib import Path
from typing import Any

import torch
from delta_nets import DELTA_NET_SIZES, EXPERTS
from tiny_models import SMALL, edited_weights
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.pair import save_tokenizer

SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
    "num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14, "deepstack_visual_indexes": [0],
}  # fmt: skip
TEXT: dict[str, dict[str, Any]] = {
    "mistral3": {"model_type": "mistral"},
    "qwen2_vl": {"rope_parameters": SECTIONS},
    "qwen2_5_vl": {"rope_parameters": SECTIONS},
    "qwen3_vl": {"rope_parameters": SECTIONS},
    "gemma3": {"sliding_window": 256},
    "qwen3_5": {**DELTA_NET_SIZES, "rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 0]}},
    "qwen3_5_moe": {**DELTA_NET_SIZES, **EXPERTS, "rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 0]}},
}
"""Settings of the text part by model type."""
NEW_NAMES = {
    r"^(language_model\.model|model(?!\.(visual|vision_tower|language_model)))\.": "model.language_model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^visual\.": "model.visual.",
    r"^(vision_tower|multi_modal_projector)\.": r"model.\1.",
}
"""Patterns of weight names in old checkpoints, and their replacements in new ones."""


@torch.no_grad()
def save_vision_language(folder: Path, kind: str, noise: float = 0.0, **changes: Any) -> Any:
    """Save a random model and its tokenizer; return the model. `noise`: added to its weights."""
    vision = VISION | ({"model_type": "pixtral"} if kind == "mistral3" else {})
    text = {**SMALL, **TEXT[kind], **changes}
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"]
    )
    config.mm_tokens_per_image = 4  # of Gemma 3
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    for weight in matrices:
        weight.normal_(std=0.12)
    for weight in matrices if noise else ():
        weight.add_(torch.randn_like(weight), alpha=noise)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model.eval()


def use_new_names(folder: Path) -> None:
    """Rename the weights of a checkpoint to the names that transformers models have used since 2025."""
    with edited_weights(folder) as weights:
        for name in list(weights):
            new = name
            for pattern, replacement in NEW_NAMES.items():
                new = re.sub(pattern, replacement, new)
            weights[new] = weights.pop(name)
