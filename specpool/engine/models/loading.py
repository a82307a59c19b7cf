"""Loads a model with its tokenizer, or only a rank's shard of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specpool.engine.config.devices import use_device
from specpool.engine.config.options import INT8, EngineOptions, Int8RefusedError
from specpool.engine.config.sources import UnsupportedModelError, gguf_file_of
from specpool.engine.models.checkpoint_quantization import method_of
from specpool.engine.models.config import explain, load_config, resolve_max_model_len
from specpool.engine.models.draft_parts import (
    FEATURE_INPUT,
    OUTPUT_HEAD,
    Features,
    add_feature_input,
    features_of,
    replace_output_head,
)
from specpool.engine.models.eagle import build_eagle_head, is_eagle_head
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.models.mtp import build_mtp_head
from specpool.engine.models.stored_model import build_stored_model, dequantize_model
from specpool.engine.models.stored_weights import GgufWeights, StoredWeights, stored_weights
from specpool.engine.models.tokenizer import load_tokenizer, tokenizer_files
from specpool.engine.models.vision_language import TEXT_NOTE, WRAPPER
from specpool.engine.models.weights import (
    check_all_used,
    check_complete,
    check_routers,
    download_weights,
    read_with_transformers,
)
from specpool.engine.passes.attention import PACKED_ATTENTION
from specpool.engine.passes.families import LATENT, MIXTURES, is_fusable, why_not_fusable
from specpool.engine.passes.features import FeatureEmbedding
from specpool.engine.sharding.shares import Share
from specpool.engine.sharding.weights import ShardConfig, checksums_of
from specpool.protocol.tokenizer import TokenizerFiles


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its tokenizer and limits, before a forward pass takes over its weights."""

    name: str
    model: PreTrainedModel
    tokenizer: TokenizerFiles
    max_model_len: int
    output_ids: torch.Tensor | None = None
    """The token of each row of the output head, if the head has rows for some tokens only."""
    notes: tuple[str, ...] = ()  # for the operator: how the weights were read
    outline: PreTrainedModel | None = None
    """The full model without weights, if `model` is quantized or a shard."""
    checksums: Mapping[str, bytes] = field(default_factory=dict)
    """Checksums of full weights by name, for some of the weights of which `model` has a shard."""
    features: Features | None = None
    """The states of its target that a feature draft reads; None: the model reads only tokens."""
    modules_run: bool = True
    """Whether transformers can run the model. It cannot run EAGLE heads and MTP layers."""

    @property
    def full(self) -> PreTrainedModel:
        """A model with the full shapes of all weights."""
        return self.model if self.outline is None else self.outline

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Number of tokens: rows of the output head, or of the embeddings if the head is partial."""
        model = self.full
        head: Any = model.get_output_embeddings() if self.output_ids is None else model.get_input_embeddings()
        return int(head.weight.shape[0])


def load_model(
    options: EngineOptions, share: Share | None = None, report: Callable[[str], None] = lambda phase: None
) -> LoadedModel:
    """Load weights and tokenizer. Raises UnsupportedModelError.

    `share`: load only this rank's shard. `report`: called with each phase.
    """
    config, device = load_config(options), use_device(options.device)
    _check_activations(options, config, device)
    _check_feature_draft(options, config)
    try:
        if options.mtp_target is not None or is_eagle_head(options):
            return _load_head(options, config, device, report)
        return _load(options, config, device, share, report)
    except Exception as error:  # the files may contain anything
        raise UnsupportedModelError(f"{options.model} cannot be loaded: {explain(error)}") from error


def _check_activations(options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> None:
    """Refuse int8 activations before any weight is read. Int8RefusedError."""
    if options.activations != INT8:
        return
    if device.type != "cpu":
        raise Int8RefusedError(f"a CPU, but the device is {device}")
    if (reason := why_not_fusable(config)) is not None:
        raise Int8RefusedError(f"the compiled pass, which cannot run this model: {reason}")
    if config.model_type in MIXTURES:
        raise Int8RefusedError("a dense model, because experts keep float32 activations")
    if config.model_type in LATENT:
        raise Int8RefusedError("a model without latent attention, which needs float32 activations")


def _check_feature_draft(options: EngineOptions, config: PreTrainedConfig) -> None:
    """Refuse a feature draft that no pass supports. UnsupportedModelError."""
    if features_of(config) is None:
        return
    reason = why_not_fusable(config)
    if reason is None and not options.fused:
        reason = "the fused pass is switched off"
    if options.tensor_parallel > 1:
        reason = "a feature draft is not sharded (--tensor-parallel)"
    if reason is not None:
        raise UnsupportedModelError(f"{options.model} reads hidden states, which needs the fused pass: {reason}")


def _load(
    options: EngineOptions,
    config: PreTrainedConfig,
    device: torch.device,
    share: Share | None,
    report: Callable[[str], None],
) -> LoadedModel:
    dtype = _resolve_dtype(options, config, device)
    shard = None if share is None else ShardConfig(config, share)
    tokenizer = load_tokenizer(options.model, options.revision)
    download_weights(options, report)
    report("loading weights")
    can_stay_quantized = _can_stay_quantized(options, config, device, dtype)
    stored = stored_weights(options, config, can_stay_quantized)
    model = _load_weights(options, config, stored, shard, device, dtype)
    check_routers(model)
    files = tokenizer_files(tokenizer, model)
    keeps_quantized = stored is not None and can_stay_quantized
    output_ids, features = replace_output_head(model, Path(options.model) / OUTPUT_HEAD), features_of(config)
    if features is not None:
        add_feature_input(model, features, Path(options.model) / FEATURE_INPUT)
    if stored is not None and not keeps_quantized:
        model = dequantize_model(model, device, dtype)
        output_ids = None if output_ids is None else output_ids.to(device)
    method, gguf = method_of(config), gguf_file_of(options.model)
    if stored is None and gguf is not None and GgufFile(gguf).is_quantized:
        method = GgufWeights.method
    notes = _dequantization_notes(stored, method, None if keeps_quantized else dtype)
    if hasattr(config, WRAPPER):
        notes = (TEXT_NOTE, *notes)
    checksums: Mapping[str, bytes] = {}
    if shard is not None:
        checksums = checksums_of(model) if stored is None else shard.checksums
    outline = None if shard is None and not keeps_quantized else _outline(model, output_ids)
    max_model_len = resolve_max_model_len(config, options)
    return LoadedModel(
        options.model, model.eval(), files, max_model_len, output_ids, notes, outline, checksums, features
    )


def _load_head(
    options: EngineOptions, config: PreTrainedConfig, device: torch.device, report: Callable[[str], None]
) -> LoadedModel:
    """Load an EAGLE head, or the MTP layer of a target."""
    assert options.target_model is not None
    target = options.mtp_target
    if options.tensor_parallel > 1 or not options.fused:
        raise UnsupportedModelError("EAGLE heads need the fused pass, on one rank")
    tokenizer = load_tokenizer(options.target_model, None if target is None else target.revision)
    if target is not None:
        download_weights(target, report)
    report("loading weights")
    build = build_eagle_head if target is None else build_mtp_head
    head = build(options, config, _resolve_dtype(options, config, device), device)
    return LoadedModel(
        options.model,
        head.model.eval(),
        tokenizer_files(tokenizer, head.model),
        resolve_max_model_len(config, options),
        head.output_ids,
        features=head.features,
        modules_run=False,
    )


def _resolve_dtype(options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    stored: torch.dtype = getattr(config, "dtype", None) or torch.bfloat16
    default = torch.float32 if device.type == "cpu" else stored
    dtype: torch.dtype = default if options.dtype == "auto" else getattr(torch, options.dtype)
    return dtype


def _load_weights(
    options: EngineOptions,
    config: PreTrainedConfig,
    stored: StoredWeights | None,
    shard: ShardConfig | None,
    device: torch.device,
    dtype: torch.dtype,
) -> PreTrainedModel:
    if stored is not None:
        model, report = build_stored_model(stored, config, shard, dtype, attn_implementation=PACKED_ATTENTION)
        check_complete(report)
        check_all_used(report)
        return model
    arguments = {} if shard is None else {"quantization_config": shard}
    model, report = read_with_transformers(
        options, config, device, dtype, attn_implementation=PACKED_ATTENTION, **arguments
    )
    check_complete(report)
    return model


def _can_stay_quantized(
    options: EngineOptions, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether a compiled pass may compute with the weights as stored."""
    compiled = options.native and (options.fused or options.tensor_parallel > 1)
    return (
        compiled
        and is_fusable(config)
        and options.weights == "auto"
        and device.type == "cpu"
        and dtype == torch.float32
    )


def _dequantization_notes(
    stored: StoredWeights | None, method: str | None, dtype: torch.dtype | None
) -> tuple[str, ...]:
    """Describe quantized weights that take more memory than in their file.

    `dtype`: the type to which all are dequantized; None: only unsupported quantization types are, to float32.
    """
    if dtype is not None:
        method = method if stored is None else stored.method
        return (_note(f"{method} weights", dtype),) if method else ()
    counts = {} if stored is None else stored.dequantized
    return tuple(_note(f"{qtype} weights (tensors: {count})", torch.float32) for qtype, count in counts.items())


def _note(weights: str, dtype: torch.dtype) -> str:
    return f"{weights} were dequantized to {str(dtype).removeprefix('torch.')}: {dtype.itemsize} bytes each"


def _outline(loaded: PreTrainedModel, output_ids: torch.Tensor | None) -> PreTrainedModel:
    """The model without weights, from its configuration and the parts that were replaced."""
    config: Any = loaded.config
    embedding: Any = loaded.get_input_embeddings()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
        if output_ids is not None:
            model.set_output_embeddings(nn.Linear(config.hidden_size, len(output_ids), bias=False))
        if isinstance(embedding, FeatureEmbedding):
            model.set_input_embeddings(embedding.outlined(model.get_input_embeddings()))
    outline: PreTrainedModel = model
    return outline
