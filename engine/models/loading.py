"""Loads a model through transformers, and refuses, with a reason, models that the engine cannot run exactly."""

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
"""File beside a model's own files: `weight` [rows, hidden] of a head with rows for some tokens, their `output_ids`."""


class UnsupportedModelError(Exception):
    """The model cannot be served; the message says why."""


class _ConfigTypes(BaseModel, from_attributes=True, strict=True):
    """Types of the configuration values that the engine reads; transformers may accept other types."""

    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    max_position_embeddings: int | None = None
    num_attention_heads: int | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its tokenizer and limits, before a forward pass takes over its weights."""

    name: str
    model: PreTrainedModel
    tokenizer: TokenizerFiles
    max_model_len: int
    output_ids: torch.Tensor | None = None
    """The token of each row of the output head, if it has rows for some tokens only, as a trained draft may."""

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the model."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Number of tokens the model knows: rows of the output head, or of the embeddings if the head has fewer."""
        head: Any = self.model.get_output_embeddings() if self.output_ids is None else self.model.get_input_embeddings()
        return int(head.weight.shape[0])

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of embeddings and output head; shared weights count once."""
        ends: list[Any] = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        return sum(weight.numel() for weight in {end.weight for end in ends})


def load_config(options: EngineOptions) -> PreTrainedConfig:
    """The configuration of a model. UnsupportedModelError if it tells that the model cannot be served."""
    source = _source(options.model)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(**source)
    except Exception as error:  # the files may contain anything
        reason = f"{options.model} is not a model folder, GGUF file or hub id: {first_line(error)}"
        raise UnsupportedModelError(reason) from error
    _check_types(config)
    refuse_unsupported(config, _max_model_len(config, options))
    return config


def load_model(options: EngineOptions) -> LoadedModel:
    """Loads weights and tokenizer. Raises UnsupportedModelError, or OSError for files that are no model."""
    source, config = _source(options.model), load_config(options)
    device = pick_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for this thread: kernels and graphs go to the current device
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
            ignore_mismatched_sizes=True,  # reported below like missing weights; transformers only warns
        )
        model, loading_info = loaded
        _refuse_made_up_weights(loading_info)
        files = tokenizer_files(tokenizer, model)
    except Exception as error:  # the files may contain anything
        fixed = isinstance(error, KeyError) and error.args == (PACKED_ATTENTION,)
        reason = f"{config.model_type} has a fixed choice of attentions" if fixed else first_line(error)
        raise UnsupportedModelError(f"{options.model} cannot be loaded: {reason}") from error
    output_ids = _reduce_head(model, Path(options.model) / OUTPUT_HEAD)
    if output_ids is not None:
        output_ids = output_ids.to(device)  # every pass needs them there
    return LoadedModel(options.model, model.to(device).eval(), files, _max_model_len(config, options), output_ids)


def pick_device(wanted: str) -> torch.device:
    """The device that `wanted` names; "auto" takes a GPU if there is one. UnsupportedModelError if there is none."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedModelError(f"device {wanted} cannot be used: {first_line(error)}") from error
    return device


def refuse_unsupported(config: PreTrainedConfig, max_model_len: int) -> None:
    """Raises UnsupportedModelError for everything that the configuration alone rules out."""
    kind = f"{config.model_type} model"
    architectures = getattr(config, "architectures", None) or []
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"a {kind} is an encoder-decoder; only decoder-only models generate by this method")
    # A GGUF file names no class; transformers then uses its class for this kind of model.
    named = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    if not (named if architectures else type(config) in MODEL_FOR_CAUSAL_LM_MAPPING):
        names = ", ".join(architectures) or "none"
        raise UnsupportedModelError(f"a {kind} has no causal language-model head (architectures: {names})")
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
    """Replaces the output head by that of a file, if the file exists; returns the tokens of its rows."""
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
    """The files of a tokenizer. UnsupportedModelError if it has no fast form."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError("the tokenizer has no fast (tokenizer.json) form")
    # Some models name more end-of-sequence tokens in one of their files than in another.
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


def _refuse_made_up_weights(loading_info: dict[str, Any]) -> None:
    """Refuses a checkpoint that transformers had to complete with random weights.

    Unused weights, such as those of further heads, do no harm; transformers warns of them.
    """
    made_up = {name: name for name in loading_info["missing_keys"]}
    for name, stored, wanted in loading_info["mismatched_keys"]:
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
    """The length of a sequence beyond which the rotary embedding of its whole batch changes; None if it never does."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one per type of layer
    return min(
        (kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"),
        default=None,
    )


def first_line(error: Exception) -> str:
    """The first line of another library's error, short enough for a message of our own."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
