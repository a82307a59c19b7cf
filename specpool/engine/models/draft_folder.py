"""Saves a trained draft as a model folder, with the embeddings and tokenizer of its target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specpool.engine.config.architectures import FEATURES
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.checkpoint_quantization import DRAFT_METHOD
from specpool.engine.models.config import load_config
from specpool.engine.models.draft_parts import FEATURE_INPUT, OUTPUT_HEAD
from specpool.engine.models.draft_weights import save_named
from specpool.engine.models.stored_weights import EMBEDDING, HEAD
from specpool.engine.models.tokenizer import load_tokenizer
from specpool.engine.models.vision_language import WRAPPER
from specpool.engine.models.weights import read_embeddings
from specpool.engine.weights.quantized import Weight, as_tensor


def count_layers(trained: Mapping[str, Weight]) -> int:
    return len({name.split(".")[2] for name in trained if name.startswith("body.layers.")})


def draft_config(target: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    values = {**target.to_dict(), "num_hidden_layers": layers, "tie_word_embeddings": True}
    values.pop(WRAPPER, None)
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    return type(target)(**values)


def save_draft(folder: Path, target: str, trained: Mapping[str, Weight]) -> None:
    """Save a folder that a draft worker can load, with the weights as given and the target's embeddings.

    `trained`: "body.*", named as in the target's architecture; "head", the rows of the output head; and "output_ids",
    the tokens of these rows. A feature draft also has "feature_layers", the numbers of the target's layers after which
    it reads states; "fc"; and "project", unless states are as wide as the draft (see `feature_input`).
    """
    options = EngineOptions(model=target)
    config = draft_config(load_config(options), count_layers(trained))
    with torch.device("meta"):
        draft: Any = AutoModelForCausalLM.from_config(config)
    names = [name for name in draft.state_dict() if name not in (EMBEDDING, HEAD)]
    weights = {name: trained["body." + name.removeprefix("model.")] for name in names}
    weights[EMBEDDING] = read_embeddings(options)
    config.quantization_config = {"quant_method": DRAFT_METHOD}
    if "feature_layers" in trained:
        setattr(config, FEATURES, _features(trained, config.hidden_size))
    config.save_pretrained(folder)
    draft.generation_config.save_pretrained(folder)
    load_tokenizer(target).save_pretrained(folder)
    save_named(folder / "model.safetensors", weights)
    save_named(folder / OUTPUT_HEAD, {"weight": trained["head"], "output_ids": trained["output_ids"]})
    inputs = {name: trained[name] for name in ("fc", "project") if name in trained}
    if inputs:
        save_named(folder / FEATURE_INPUT, inputs)


def _features(trained: Mapping[str, Weight], hidden_size: int) -> dict[str, Any]:
    layers, project = as_tensor(trained["feature_layers"]).tolist(), trained.get("project")
    return {"layers": layers, "width": hidden_size if project is None else project.shape[1]}
