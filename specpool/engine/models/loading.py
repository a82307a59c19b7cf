"""Loads a model through transformers, and refuses, with a reason, models that the engine cannot run exactly."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specpool.engine.config.devices import use_device
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, first_line, gguf_file_of, source_of
from specpool.engine.models.compact import find_named
from specpool.engine.models.gguf_file import GgufError, GgufFile
from specpool.engine.models.quantization import INSTEAD, are_scales, method_of, unpacking
from specpool.engine.models.stored import EMBEDDING, StoredWeights, decode_model, read_stored, stored_weights
from specpool.engine.models.support import why_unsupported
from specpool.engine.passes.attention import PACKED_ATTENTION
from specpool.engine.passes.fused import is_fusable
from specpool.engine.sharding.shares import Share
from specpool.engine.sharding.weights import ShardConfig, sums_of
from specpool.engine.weights.quantized import Quantized, QuantizedLinear, Weight, linear_of
from specpool.protocol.tokenizer import TokenizerFiles

log = logging.getLogger(__name__)

# Otherwise transformers would ask the hub to convert a checkpoint, and load the conversion that is proposed to its
# owner.
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "true"

DEFAULT_MAX_MODEL_LEN = 4096

NAMES_IN_A_MESSAGE = 3

OUTPUT_HEAD = "output_head.safetensors"
"""File beside a model's own files: `weight` [rows, hidden] of a head with rows for some tokens, their `output_ids`."""


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
    notes: tuple[str, ...] = ()
    """What an operator should know about how the weights were read."""
    whole: PreTrainedModel | None = None
    """The model without weights, if `model` has quantized ones, or only a rank's share."""
    sums: Mapping[str, bytes] = field(default_factory=dict)
    """By name, sums of some whole weights of which `model` has a part (`specpool.engine.sharding.weights`)."""

    @property
    def described(self) -> PreTrainedModel:
        """A model with the shapes of all weights."""
        return self.model if self.whole is None else self.whole

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the model."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Number of tokens the model knows: rows of the output head, or of the embeddings if the head has fewer."""
        model = self.described
        head: Any = model.get_output_embeddings() if self.output_ids is None else model.get_input_embeddings()
        return int(head.weight.shape[0])

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of embeddings and output head; shared weights count once."""
        ends: list[Any] = [self.described.get_input_embeddings(), self.described.get_output_embeddings()]
        return sum(weight.numel() for weight in {end.weight for end in ends})


def load_config(options: EngineOptions) -> PreTrainedConfig:
    """The configuration of a model. UnsupportedModelError if it tells that the model cannot be served."""
    source = source_of(options.model, options.revision)
    try:
        if "gguf_file" in source:
            GgufFile(Path(options.model))  # whose errors say more than those of transformers
        config: PreTrainedConfig = AutoConfig.from_pretrained(**source)
    except GgufError as error:
        raise UnsupportedModelError(str(error)) from error
    except Exception as error:  # the files may contain anything
        reason = f"{options.model} is not a model folder, GGUF file or hub id: {_reason(error)}"
        raise UnsupportedModelError(reason) from error
    _check_types(config)
    refusal = why_unsupported(config, _max_model_len(config, options))
    if refusal is not None:
        raise UnsupportedModelError(refusal)
    return config


def load_model(options: EngineOptions, share: Share | None = None) -> LoadedModel:
    """Loads weights and tokenizer. Raises UnsupportedModelError, or OSError for files that are no model.

    `share`: what this rank has of a model that `load_sharding` could divide.
    """
    config, device = load_config(options), use_device(options.device)
    dtype: Any = None if options.dtype == "auto" else getattr(torch, options.dtype)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else getattr(config, "dtype", None) or torch.bfloat16
    asked = None if share is None else ShardConfig(config, share)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source_of(options.model, options.revision))
        stored = stored_weights(options, config)
        kept = stored is not None and _keeps(options, config, device, dtype)
        if stored is not None:
            model, report = read_stored(stored, config, asked, dtype, attn_implementation=PACKED_ATTENTION)
        else:
            shards = {} if asked is None else {"quantization_config": asked}
            model, report = _read_by_library(
                options, config, device, dtype, attn_implementation=PACKED_ATTENTION, **shards
            )
        refuse_made_up_weights(report)
        if stored is not None:
            refuse_unread_weights(report)
        files = tokenizer_files(tokenizer, model)
    except Exception as error:  # the files may contain anything
        fixed = isinstance(error, KeyError) and error.args == (PACKED_ATTENTION,)
        reason = f"{config.model_type} has a fixed choice of attentions" if fixed else _reason(error)
        raise UnsupportedModelError(f"{options.model} cannot be loaded: {reason}") from error
    output_ids = _reduce_head(model, Path(options.model) / OUTPUT_HEAD)
    if stored is not None and not kept:
        model = decode_model(model, device, dtype)
        output_ids = None if output_ids is None else output_ids.to(device)
    notes = _unpacked_notes(stored, method_of(config), None if kept else dtype)
    loaded = LoadedModel(options.model, model.eval(), files, _max_model_len(config, options), output_ids, notes)
    if asked is None and not kept:
        return loaded
    sums = {} if asked is None else sums_of(model) if stored is None else asked.sums
    return replace(loaded, whole=_without_weights(config, output_ids), sums=sums)


def _keeps(options: EngineOptions, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a pass may be compiled that computes with weights as they are stored."""
    compiled = options.native and (options.fused or options.tensor_parallel > 1) and is_fusable(config)
    return compiled and options.weights == "auto" and device.type == "cpu" and dtype == torch.float32


def read_weights(
    model: str,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    revision: str | None = None,
    **others: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The library's model with all weights in this dtype on a device, and what is to be reported of the weights.

    `others`: further arguments for transformers. Any error of transformers passes through.
    """
    options = EngineOptions(model=model, revision=revision)
    stored = stored_weights(options, config)
    if stored is None:
        return _read_by_library(options, config, device, dtype, **others)
    read, report = read_stored(stored, config, **others)
    return decode_model(read, device, dtype), report


def embeddings_of(options: EngineOptions) -> Weight:
    """The embeddings of a model, as they are stored."""
    config = load_config(options)
    stored = stored_weights(options, config)
    weight = None if stored is None else stored.find(EMBEDDING)
    if weight is not None:
        return weight
    whole, _ = read_weights(options.model, config, torch.device("cpu"), torch.bfloat16, options.revision)
    embeddings: Any = whole.get_input_embeddings()
    found: torch.Tensor = embeddings.weight.detach()
    return found


def _read_by_library(
    options: EngineOptions, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, **others: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model as transformers reads it onto a device, and what transformers reports of its weights."""
    source, gguf = source_of(options.model, options.revision), gguf_file_of(options.model)
    if gguf is not None and "gguf_file" not in source:  # beside a configuration
        source = {**source, "gguf_file": gguf.name, "config": config}
    quantized = unpacking(config, source)
    # A GPU's weights are read tensor by tensor, so that the memory of the host never holds the whole model. A rank's
    # pieces are cut on the host, from files that are mapped, so that the rest need not be read.
    placed = {"device_map": {"": device}} if device.type == "cuda" and "quantization_config" not in others else {}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **{**source, **quantized, **placed, **others},
        dtype=dtype,
        output_loading_info=True,
        use_safetensors=True,  # a checkpoint in Python's pickle format can run code
        ignore_mismatched_sizes=True,  # left to the report, like missing weights; transformers only warns
    )
    read, report = loaded
    if quantized:
        for weight in read.parameters():  # those that are stored without quantization have kept their dtype
            weight.data = weight.data.to(dtype)
    return read.to(device), report


def _unpacked_notes(stored: StoredWeights | None, method: str | None, dtype: torch.dtype | None) -> tuple[str, ...]:
    """What an operator should know of quantized weights that take more memory than in their file.

    `dtype`: that to which all of them are unpacked; None: only those that cannot be kept are, to float32.
    """
    if dtype is not None:
        found, into = (method if stored is None else stored.method), dtype
        return (_unpacked(f"{found} weights", into),) if found else ()
    kinds = {} if stored is None else stored.unpacked
    return tuple(_unpacked(f"{kind} weights (tensors: {count})", torch.float32) for kind, count in kinds.items())


def _unpacked(what: str, dtype: torch.dtype) -> str:
    return f"its {what} are unpacked to {str(dtype).removeprefix('torch.')}: {dtype.itemsize} bytes each"


def _without_weights(config: PreTrainedConfig, output_ids: torch.Tensor | None) -> PreTrainedModel:
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(config)
        if output_ids is not None:
            whole.set_output_embeddings(nn.Linear(config.hidden_size, len(output_ids), bias=False))
    described: PreTrainedModel = whole
    return described


def _reduce_head(model: PreTrainedModel, file: Path) -> torch.Tensor | None:
    """Replaces the output head by that of a file, if the file exists; returns the tokens of its rows."""
    if not file.is_file():
        return None
    try:
        stored = load_file(file, device=str(model.device))  # where every pass needs them
        weight, output_ids = find_named(stored, "weight"), stored["output_ids"].long()
        if weight is None:
            raise KeyError("weight")
    except KeyError as error:
        raise UnsupportedModelError(f"{file} has no tensor {error}") from error
    except Exception as error:  # the file may contain anything
        raise UnsupportedModelError(f"{file} cannot be read: {first_line(error)}") from error
    config: Any = model.config
    known, tokens = config.vocab_size, output_ids.numel()
    one_each = output_ids.dim() == 1 and tokens > 0 and tuple(weight.shape) == (tokens, config.hidden_size)
    if not one_each or not 0 <= int(output_ids.min()) <= int(output_ids.max()) < known:
        raise UnsupportedModelError(f"{file} has a head of {tuple(weight.shape)} for {tokens} tokens")
    model.set_output_embeddings(
        QuantizedLinear([weight]) if isinstance(weight, Quantized) else linear_of(weight.to(model.dtype), None)
    )
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


def _check_types(config: PreTrainedConfig) -> None:
    try:
        _ConfigTypes.model_validate(config)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UnsupportedModelError(f"the configuration has {key} {problem['input']!r}: {problem['msg']}") from None


def refuse_made_up_weights(report: dict[str, Any]) -> None:
    """Refuses a checkpoint that transformers had to complete with random weights.

    `report`: what transformers reports of the weights. Unused ones, such as those of further heads, do no harm, and
    transformers warns of them; scales that used weights have to be multiplied by are refused.
    """
    made_up = {name: name for name in report["missing_keys"]}
    for name, stored, wanted in report["mismatched_keys"]:
        made_up[name] = f"{name} (of shape {list(wanted)}, not {list(stored)})"
    if made_up:
        some = _some_of([made_up[name] for name in sorted(made_up)])
        raise UnsupportedModelError(f"its files lack {len(made_up)} of the weights that it needs: {some}")
    scales = sorted(filter(are_scales, report["unexpected_keys"]))
    if scales:
        raise UnsupportedModelError(
            f"its weights are quantized, as {scales[0]} shows, but its configuration does not say how; {INSTEAD}"
        )


def refuse_unread_weights(report: dict[str, Any]) -> None:
    """Refuses a checkpoint with weights that the model has no place for, so that it would be another model.

    `report`: what `read_stored` reports of the weights.
    """
    unread = report["unexpected_keys"]
    if unread:
        raise UnsupportedModelError(
            f"its files have {len(unread)} weights for which its configuration has no place: {_some_of(unread)}"
        )


def _some_of(names: list[str]) -> str:
    """The first names, for a message."""
    return ", ".join(names[:NAMES_IN_A_MESSAGE]) + (", ..." if len(names) > NAMES_IN_A_MESSAGE else "")


def _max_model_len(config: PreTrainedConfig, options: EngineOptions) -> int:
    limit = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN
    if options.max_model_len is not None and options.max_model_len > limit:
        raise UnsupportedModelError(f"max_model_len {options.max_model_len} is beyond the model's {limit} positions")
    return options.max_model_len or min(limit, DEFAULT_MAX_MODEL_LEN)


def _reason(error: Exception) -> str:
    """Why transformers loads nothing, in our own words where it refuses what is not safe."""
    reason = first_line(error)
    if "contains custom code" in reason:
        return "it needs code that comes with it, and such code is never run"
    if "no file named model.safetensors" in reason or "a file named model.safetensors" in reason:
        return (
            "it has no model.safetensors; "
            "only such files and GGUF files are read, since others, such as .bin, can run code"
        )
    return reason
