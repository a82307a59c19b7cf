"""Builds EAGLE heads of others: one decoder layer that reads hidden states, with the embeddings of its target.

EAGLE-1 and 2 (Li et al., arXiv 2401.15077 and 2406.16858) read the target's last states after its final norm, and
choose tokens with its output head. EAGLE-3 (arXiv 2503.01840) reads the states after three layers, and usually has an
output head of its own. EAGLE-3.1 adds norms (see `EagleFormat`).
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specpool.engine.config.options import MTP, EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config import load_config
from specpool.engine.models.draft_parts import FeatureHead, Features, features_of, shaped, state_norm_of
from specpool.engine.models.eagle_files import (
    D2T,
    EAGLE3_LAYER,
    FC,
    FIRST_LAYER,
    UNUSED,
    read_tensors,
    why_no_head,
)
from specpool.engine.models.eagle_format import format_of
from specpool.engine.models.mtp import mtp_features
from specpool.engine.models.stored_weights import EMBEDDING, HEAD
from specpool.engine.models.weights import check_all_used, check_complete, read_weight
from specpool.engine.passes.families import LATENT, why_not_fusable
from specpool.engine.passes.features import FeatureEmbedding, StateNorm
from specpool.engine.weights.quantized import as_tensor, linear_of

HIDDEN_NORM, INPUT_NORM, FC_NORM = FIRST_LAYER + "hidden_norm.weight", "input_norm.weight", "fc_norm.{}.weight"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
JOINED = tuple(f"self_attn.{name}.weight" for name in PROJECTIONS)
"""Weights of EAGLE-3's first layer. Their columns read embeddings, then states."""
INTEGERS = (torch.int64, torch.int32)
TOKENIZERS = ("tokenizer*", "vocab*", "*.gguf")
"""Files of folders with a tokenizer. EAGLE heads need none."""


def is_eagle_head(options: EngineOptions) -> bool:
    """Whether a model is a folder with an EAGLE head.

    UnsupportedModelError: its target is not named, or it is named and the folder has neither a head nor a tokenizer.
    """
    folder = Path(options.model)
    if options.model == MTP or not folder.is_dir():
        return False
    reason = why_no_head(folder)
    if reason is None and options.target_model is None:
        raise UnsupportedModelError(
            f"{options.model} is an EAGLE head, a draft that needs the embeddings of its target: set target_model"
        )
    if reason is not None and options.target_model is not None and not any(map(any, map(folder.glob, TOKENIZERS))):
        raise UnsupportedModelError(f"it has no tokenizer and is not an EAGLE head: {reason}")
    return reason is None


def features_of_draft(options: EngineOptions) -> Features | None:
    """The states that a draft reads; None if it reads none. UnsupportedModelError."""
    config = load_config(options)
    if options.mtp_target is not None:
        return mtp_features(load_config(options.mtp_target))
    return _builder_of(options, config).features if is_eagle_head(options) else features_of(config)


def build_eagle_head(
    options: EngineOptions, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> FeatureHead:
    """Read a head and what it borrows from its target. UnsupportedModelError: it does not fit the target."""
    return _builder_of(options, config).build(dtype, device)


def _builder_of(options: EngineOptions, config: PreTrainedConfig) -> "_Builder":
    assert options.target_model is not None
    if (reason := why_not_fusable(config)) is not None:
        raise UnsupportedModelError(f"EAGLE heads need the fused pass: {reason}")
    if config.model_type in LATENT:
        raise UnsupportedModelError("EAGLE heads with latent attention are not supported")
    return _Builder(config, read_tensors(Path(options.model)), EngineOptions(model=options.target_model))


class _Builder:
    def __init__(self, config: Any, tensors: dict[str, torch.Tensor], target: EngineOptions) -> None:
        self.config, self.target, self.target_config = config, target, load_config(target)
        tokens, expected = config.vocab_size, self.target_config.vocab_size
        if tokens != expected:
            raise UnsupportedModelError(f"its vocabulary has {tokens} tokens, but the target's has {expected}")
        self.tensors = {
            FIRST_LAYER + name.removeprefix(EAGLE3_LAYER) if name.startswith(EAGLE3_LAYER) else name: tensor
            for name, tensor in tensors.items()
            if not name.endswith(UNUSED)
        }
        is_eagle3 = HIDDEN_NORM in self.tensors or any(name.startswith(EAGLE3_LAYER) for name in tensors)
        self.format = format_of(config, is_eagle3, int(self.target_config.num_hidden_layers))
        layers = self.format.layers
        self.features = Features(layers, len(layers) * self.target_config.hidden_size)

    def build(self, dtype: torch.dtype, device: torch.device) -> FeatureHead:
        hidden, width = self.config.hidden_size, self.features.width
        output_ids = self._output_ids()
        model = self._empty_model(self._output_rows(output_ids))
        embedding = FeatureEmbedding(self._embedding(), *self._input(hidden, width), self.format.norm_output)
        self._fill(model)
        model.set_input_embeddings(embedding)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
        ids = None if output_ids is None else output_ids.to(device)
        return FeatureHead(model.to(device), self.features, ids)

    def _empty_model(self, rows: int) -> Any:
        """The layers, and an output head with `rows`, without weights, in the modules that the head has."""
        with init_empty_weights(include_buffers=False):
            if self.format.is_eagle3:
                return eagle3_modules(self.config, rows, self.format.norm_before_residual)
            return eagle1_modules(self.config)

    def _fill(self, model: Any) -> None:
        """Give the layers, the output head, and the norm of EAGLE-3 their weights."""
        modules = {f"layers.{index}.": layer for index, layer in enumerate(model.model.layers)}
        modules["lm_head."] = model.lm_head
        if self.format.is_eagle3:
            modules["norm."] = model.model.norm
        expected = {
            prefix + name: weight.shape
            for prefix, module in modules.items()
            for name, weight in module.named_parameters()
        }
        check_complete(
            {
                "missing_keys": sorted(expected.keys() - self.tensors.keys()),
                "mismatched_keys": [
                    (name, tuple(self.tensors[name].shape), tuple(shape))
                    for name, shape in expected.items()
                    if name in self.tensors and self.tensors[name].shape != shape
                ],
                "unexpected_keys": [],
            }
        )
        check_all_used({"unexpected_keys": sorted(self.tensors.keys() - expected.keys())})
        for prefix, module in modules.items():
            own = {name: self.tensors[prefix + name] for name, _ in module.named_parameters()}
            if self.format.is_eagle3 and prefix == FIRST_LAYER:  # states come first, as in `FeatureEmbedding`
                own |= {name: own[name].roll(self.config.hidden_size, 1) for name in JOINED}
            module.load_state_dict(own, assign=True)

    def _input(self, hidden: int, width: int) -> tuple[nn.Module | None, nn.Module | None, StateNorm | None]:
        """The layers `fc`, `project` and `state_norm` of `FeatureEmbedding`."""
        weight, bias = self.tensors.pop(FC), self.tensors.pop("fc.bias", None)
        if not self.format.is_eagle3 and hidden != width:
            raise UnsupportedModelError(f"its hidden size is {hidden}, but the target's is {width}")
        shaped(FC, weight, hidden, width if self.format.is_eagle3 else hidden + width)
        if bias is not None:
            shaped("fc.bias", bias, hidden)
        if self.format.is_eagle3:
            return None, linear_of(weight, bias), self._state_norm()
        norm = state_norm_of(self.target_config, as_tensor(self._of_target("model.norm.weight")))
        return linear_of(weight.roll(hidden, 1), bias), None, norm

    def _state_norm(self) -> StateNorm | None:
        """The norm of the target's states before `fc` of EAGLE-3."""
        if not self.format.norm_before_fc and not self.format.fc_norm:
            return None
        names = [FC_NORM.format(part) for part in range(len(self.format.layers))]
        if self.format.norm_before_fc:
            names = [INPUT_NORM]
        weights, size = list[torch.Tensor](), self.features.width // len(names)
        for name in names:
            weights.append(shaped(name, self.tensors.pop(name, None), size))
        return StateNorm(torch.stack(weights), self.config.rms_norm_eps)

    def _embedding(self) -> nn.Module:
        weight = self.tensors.pop("embed_tokens.weight", None)
        if weight is None:
            weight = as_tensor(self._of_target(EMBEDDING))
        shaped("embed_tokens.weight", weight, self.config.vocab_size, self.config.hidden_size)
        embedding: nn.Module = nn.Embedding.from_pretrained(weight)
        return embedding

    def _output_ids(self) -> torch.Tensor | None:
        """The token of each row of the head. `d2t` has its distance from the row."""
        distances = self.tensors.pop(D2T, None)
        if distances is None:
            return None
        if distances.dtype not in INTEGERS:
            raise UnsupportedModelError(f"d2t has the type {distances.dtype}, not int64 or int32")
        ids = distances.long().flatten() + torch.arange(distances.numel())
        if not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise UnsupportedModelError("d2t names tokens beyond the vocabulary")
        if len(ids.unique()) < len(ids):
            raise UnsupportedModelError("d2t names a token for several rows")
        return ids

    def _output_rows(self, output_ids: torch.Tensor | None) -> int:
        """The rows of the output head, which is the target's for these tokens if the files have none."""
        rows, source = (self.config.vocab_size, "the vocabulary") if output_ids is None else (len(output_ids), D2T)
        if "lm_head.weight" not in self.tensors:
            head = as_tensor(self._of_target(HEAD))
            self.tensors["lm_head.weight"] = head if output_ids is None else head[output_ids]
        shape = [*self.tensors["lm_head.weight"].shape]
        if shape[:1] != [rows]:
            raise UnsupportedModelError(f"lm_head.weight has the shape {shape}, but {source} has {rows} tokens")
        return rows

    def _of_target(self, name: str) -> Any:
        return read_weight(self.target, self.target_config, name)


def eagle1_modules(config: PreTrainedConfig) -> Any:
    """The modules of an EAGLE-1 head, except its input."""
    model: Any = AutoModelForCausalLM.from_config(config)
    model.model.layers[0].input_layernorm = model.model.norm = nn.Identity()
    return model


def eagle3_modules(config: PreTrainedConfig, outputs: int, norm_before_residual: bool = False) -> Any:
    """The modules of an EAGLE-3 head with `outputs` rows of logits, except its input."""
    model: Any = AutoModelForCausalLM.from_config(config)
    first, hidden = model.model.layers[0], model.config.hidden_size
    first.hidden_norm, first.norms_residual = deepcopy(first.input_layernorm), norm_before_residual
    for name in PROJECTIONS:
        linear = getattr(first.self_attn, name)
        wider = nn.Linear(2 * hidden, linear.out_features, linear.bias is not None)
        setattr(first.self_attn, name, wider)
    model.lm_head = nn.Linear(hidden, outputs, bias=False)
    return model
