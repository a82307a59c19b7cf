"""Saves a trained draft as a model folder: the trained weights with the embeddings and tokenizer of the target."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from engine.models.loading import OUTPUT_HEAD


def layers_of(trained: dict[str, torch.Tensor]) -> int:
    """The number of layers that were trained."""
    return len({name.split(".")[2] for name in trained if name.startswith("body.layers.")})


def draft_config(target: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The configuration of the target with another number of layers."""
    values = {**target.to_dict(), "num_hidden_layers": layers, "tie_word_embeddings": True}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    return type(target)(**values)


def save_draft(folder: Path, target: str, trained: dict[str, torch.Tensor]) -> None:
    """Saves a folder that a draft worker can load, with all weights in bfloat16.

    `trained`: "body.*", with the names that the target's kind of model has; "head", the rows of the output head; and
    "output_ids", the tokens of these rows.
    """
    whole: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    draft: Any = type(whole)(draft_config(whole.config, layers_of(trained))).bfloat16()
    draft.model.embed_tokens.weight.data = whole.model.embed_tokens.weight.data
    body = {name.removeprefix("body."): weight for name, weight in trained.items() if name.startswith("body.")}
    missing = draft.model.load_state_dict(body, strict=False).missing_keys
    assert missing == ["embed_tokens.weight"], missing
    draft.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    save_file({"weight": trained["head"].bfloat16(), "output_ids": trained["output_ids"]}, folder / OUTPUT_HEAD)
