"""Loads a model through transformers, and refuses with a reason what the engine cannot run exactly."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from engine.options import EngineOptions
from engine.passes.attention import PACKED_ATTENTION
from protocol.tokenizer import TokenizerFiles

log = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 4096

NAMES_IN_A_MESSAGE = 3

OUTPUT_HEAD = "output_head.safetensors"
"""Beside a model's own files: `weight` [rows, hidden] of a head with rows for some tokens, and these: `output_ids`."""


class UnsupportedModelError(Exception):
    """The model cannot be served; the message says why."""


class _ConfigTypes(BaseModel, from_attributes=True, strict=True):
    """What we read of a configuration, where transformers may let other types pass."""

    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    max_position_embeddings: int | None = None
    num_attention_heads: int | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with what its configuration says about it."""

    name: str
    model: PreTrainedModel
    tokenizer: TokenizerFiles
    max_model_len: int
    output_ids: torch.Tensor | None = None
    """The token of each row of the output head, where it has rows for some tokens only, as a trained draft's may."""

    @property
    def config(self) -> PreTrainedConfig:
        """The model's own configuration."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows: rows of the output head, if that has one for each."""
        head: Any = self.model.get_output_embeddings() if self.output_ids is None else self.model.get_input_embeddings()
        return int(head.weight.shape[0])

    @property
    def embedding_parameters(self) -> int:
        """Of the embeddings and the output head; where they share their weights, these count once."""
        ends: list[Any] = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        return sum(weight.numel() for weight in {end.weight for end in ends})


def load_config(options: EngineOptions) -> PreTrainedConfig:
    """The configuration of a model that, as far as it tells, can be served. UnsupportedModelError if it cannot."""
    source = _source(options.model)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(**source)
    except Exception as error:  # the files may hold anything
        reason = f"{options.model} is not a model folder, GGUF file or hub id: {first_line(error)}"
        raise UnsupportedModelError(reason) from error
    _check_types(config)
    refuse_unsupported(config, _max_model_len(config, options))
    return config


def load_model(options: EngineOptions) -> LoadedModel:
    """Loads weights and tokenizer. Raises UnsupportedModelError, or OSError for what is no model."""
    source, config = _source(options.model), load_config(options)
    device = pick_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread: kernels and graphs go to the current one
    dtype: Any = options.dtype
    if options.dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else getattr(config, "dtype", None) or torch.bfloat16
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            dtype=dtype,
            attn_implementation=PACKED_ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported like those that are missing, which transformers only warns of
        )
        model, found = loaded
        _refuse_made_up_weights(found)
        files = tokenizer_files(tokenizer, model)
    except Exception as error:  # likewise
        fixed = isinstance(error, KeyError) and error.args == (PACKED_ATTENTION,)
        reason = f"{config.model_type} has a fixed choice of attentions" if fixed else first_line(error)
        raise UnsupportedModelError(f"{options.model} cannot be loaded: {reason}") from error
    output_ids = _reduce_head(model, Path(options.model) / OUTPUT_HEAD)
    if output_ids is not None:
        output_ids = output_ids.to(device)  # every pass needs them there
    return LoadedModel(options.model, model.to(device).eval(), files, _max_model_len(config, options), output_ids)


def pick_device(wanted: str) -> torch.device:
    """The device that `wanted` names; "auto" takes a GPU if there is one. UnsupportedModelError if it is not there."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedModelError(f"device {wanted} cannot be used: {first_line(error)}") from error
    return device


def refuse_unsupported(config: PreTrainedConfig, max_model_len: int) -> None:
    """Raises UnsupportedModelError for all that a configuration alone tells."""
    kind = f"{config.model_type} model"
    architectures = getattr(config, "architectures", None) or []
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"a {kind} is an encoder-decoder; only decoder-only models generate by this method")
    # A GGUF file names no class: then the one that transformers has for this kind of model is taken.
    named = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    if not (named if architectures else type(config) in MODEL_FOR_CAUSAL_LM_MAPPING):
        found = ", ".join(architectures) or "none"
        raise UnsupportedModelError(f"a {kind} has no causal language-model head (architectures: {found})")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        raise UnsupportedModelError(f"this {kind} has {', '.join(others)} layers; only full attention is served")
    if not getattr(config, "num_attention_heads", None):
        raise UnsupportedModelError(f"a {kind} has no attention; only full attention is served")
    switch = _length_dependent_rope(config)
    if switch is not None and switch < max_model_len:
        raise UnsupportedModelError(
            f"this {kind} encodes all positions of a batch differently once one is beyond {switch}; "
            f"serve it with max_model_len <= {switch}"
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < max_model_len:
        raise UnsupportedModelError(
            f"this {kind} has a sliding window of {window} positions; serve it with max_model_len <= {window}"
        )


def _reduce_head(model: PreTrainedModel, file: Path) -> torch.Tensor | None:
    """Gives the model the head of this file, if there is one; returns the tokens of its rows."""
    if not file.is_file():
        return None
    stored = load_file(file)
    weight, output_ids = stored["weight"].to(model.dtype), stored["output_ids"].long()
    known, hidden = model.get_input_embeddings().weight.shape  # type: ignore[misc]
    if weight.shape != (len(output_ids), hidden) or not 0 <= int(output_ids.min()) <= int(output_ids.max()) < known:
        raise UnsupportedModelError(f"{file} has a head of {tuple(weight.shape)} for {len(output_ids)} tokens")
    head = nn.Linear(hidden, len(output_ids), bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    model.set_output_embeddings(head)
    return output_ids


def tokenizer_files(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> TokenizerFiles:
    """Takes a tokenizer apart. UnsupportedModelError if it has no fast form."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError("the tokenizer has no fast (tokenizer.json) form")
    # Some models name more tokens that end a generation in one of their files than in another.
    ids = {tokenizer.eos_token_id}
    for config in (model.config, model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list) else [eos])
    return TokenizerFiles(
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else "",
        special_tokens={name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)},
        eos_token_ids=tuple(sorted(ids - {None})),
    )


def _source(model: str) -> dict[str, str]:
    path = Path(model)
    if not path.exists() and (path.is_absolute() or path.suffix == ".gguf"):
        raise UnsupportedModelError(f"{model}: no such file or folder")
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.exists() and not (path / "config.json").is_file():
        raise UnsupportedModelError(f"{model} is not a model folder: it has no config.json")
    return {"pretrained_model_name_or_path": model}


def _check_types(config: PreTrainedConfig) -> None:
    try:
        _ConfigTypes.model_validate(config)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UnsupportedModelError(f"the configuration has {key} {problem['input']!r}: {problem['msg']}") from None


def _refuse_made_up_weights(found: dict[str, Any]) -> None:
    """Refuses a checkpoint that transformers had to fill up with random weights.

    Of weights that the model has no use for, such as further heads, it warns, and they do no harm.
    """
    made_up = {name: name for name in found["missing_keys"]}
    for name, stored, wanted in found["mismatched_keys"]:
        made_up[name] = f"{name} (of shape {list(wanted)}, not {list(stored)})"
    if made_up:
        first = ", ".join(made_up[name] for name in sorted(made_up)[:NAMES_IN_A_MESSAGE])
        more = ", ..." if len(made_up) > NAMES_IN_A_MESSAGE else ""
        raise UnsupportedModelError(f"its files lack {len(made_up)} of the weights that it needs: {first}{more}")


def _max_model_len(config: PreTrainedConfig, options: EngineOptions) -> int:
    limit = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN
    if options.max_model_len is not None and options.max_model_len > limit:
        raise UnsupportedModelError(f"max_model_len {options.max_model_len} is beyond the model's {limit} positions")
    return options.max_model_len or min(limit, DEFAULT_MAX_MODEL_LEN)


def _length_dependent_rope(config: PreTrainedConfig) -> int | None:
    """From how many positions on the rotary embedding changes for a batch as a whole; None if it never does."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one for each type of layer
    return min(
        (kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"),
        default=None,
    )


def first_line(error: Exception) -> str:
    """What an error of another library says, short enough for a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
