"""Saves a trained draft as a model folder: the trained weights with the embeddings and tokenizer of the target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import source_of
from specpool.engine.models.compact import save_named
from specpool.engine.models.loading import OUTPUT_HEAD, embeddings_of, load_config
from specpool.engine.models.quantization import CODED
from specpool.engine.models.stored import EMBEDDING, HEAD
from specpool.engine.weights.quantized import Weight


def layers_of(trained: Mapping[str, Weight]) -> int:
    """The number of layers that were trained."""
    return len({name.split(".")[2] for name in trained if name.startswith("body.layers.")})


def draft_config(target: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The configuration of the target with another number of layers."""
    values = {**target.to_dict(), "num_hidden_layers": layers, "tie_word_embeddings": True}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    return type(target)(**values)


def save_draft(folder: Path, target: str, trained: Mapping[str, Weight]) -> None:
    """Saves a folder that a draft worker can load, with all weights as they are given, and the target's embeddings.

    `trained`: "body.*", with the names that the target's kind of model has; "head", the rows of the output head; and
    "output_ids", the tokens of these rows.
    """
    options = EngineOptions(model=target)
    config = draft_config(load_config(options), layers_of(trained))
    with torch.device("meta"):
        draft: Any = AutoModelForCausalLM.from_config(config)
    names = [name for name in draft.state_dict() if name not in (EMBEDDING, HEAD)]
    weights = {name: trained["body." + name.removeprefix("model.")] for name in names}
    weights[EMBEDDING] = embeddings_of(options)
    config.quantization_config = {"quant_method": CODED}
    config.save_pretrained(folder)
    draft.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source_of(target, None)).save_pretrained(folder)
    save_named(folder / "model.safetensors", weights)
    save_named(folder / OUTPUT_HEAD, {"weight": trained["head"], "output_ids": trained["output_ids"]})
