"""Finds the tensors of a GGUF file that make up a weight of transformers.

Sources: the name map in the PyPI package `gguf`; llama.cpp's convert_hf_to_gguf.py for what converters change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import PreTrainedConfig

from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.passes.families import GEMMA, expert_count
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Quantized, Weight, as_tensor

# In Llama's heads, llama.cpp rotates pairs of adjacent rows; transformers pairs the halves of a head.
ROTATED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
TRANSPOSED = {"c_attn", "c_proj", "c_fc"}  # GPT-2
STACKED = {
    "gate_up_proj": ("gate", "up"),
    "gate_up_proj_bias": ("gate", "up"),
    "down_proj": ("down",),
    "down_proj_bias": ("down",),
}
"""The kinds of tensors that make up each weight of all experts."""


@dataclass(frozen=True)
class LazyWeight:
    """A weight that is read when transformers asks for `weight[...]`."""

    tensors: Sequence[str]  # names in the file
    shape: Sequence[int]
    read: Callable[[], Weight]

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        return as_tensor(self.read()).view(tuple(self.shape))


class TensorNames:
    """The weights of a GGUF file by their names in transformers."""

    def __init__(self, file: GgufFile, config: PreTrainedConfig) -> None:
        self._file, self._config = file, config
        (architecture,) = (arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == file.architecture)
        self._names = get_tensor_name_map(architecture, config.num_hidden_layers)
        self.dequantized = file.dequantized
        """Number of tensors that cannot stay quantized, by quantization type."""

    def find(self, name: str) -> LazyWeight | None:
        """Return a weight; None if the file lacks it. Raises UnsupportedModelError for mismatched shapes."""
        stem, _, attribute = name.rpartition(".")
        parent, _, module = stem.rpartition(".")
        if module == "experts" and attribute in STACKED:
            return self._experts(parent, attribute)
        found = self._names.get_name(stem) or ("output" if stem == "lm_head" else None)
        tensor = f"{found}.{attribute}"
        if attribute == "e_score_correction_bias":
            tensor = f"{found}.bias".replace("ffn_gate_inp", "exp_probs_b")
        elif attribute not in ("weight", "bias"):
            tensor = f"{self._names.get_name(name)}.weight"
        if tensor not in self._file.tensors:
            return None
        shape = self._file.tensors[tensor].shape
        if module == "shared_expert_gate" and len(shape) == 1:
            return LazyWeight([tensor], (1, *shape), lambda: as_tensor(self._file.read(tensor))[None])
        if self._config.model_type == "gpt2" and module in TRANSPOSED and attribute == "weight":
            return LazyWeight([tensor], shape[::-1], lambda: _transposed(self._file.read(tensor)))
        if self._config.model_type in GEMMA and tensor.endswith("_norm.weight"):
            return LazyWeight([tensor], shape, lambda: as_tensor(self._file.read(tensor)) - 1)
        if self._file.architecture == "llama" and module in ROTATED:
            heads = getattr(self._config, ROTATED[module])
            if shape[0] % (2 * heads):
                raise UnsupportedModelError(f"{self._file.path}: tensor {tensor} has {shape[0]} rows for {heads} heads")
            return LazyWeight([tensor], shape, lambda: _rotated(self._file.read(tensor), heads))
        return LazyWeight([tensor], shape, lambda: self._file.read(tensor))

    def _experts(self, parent: str, attribute: str) -> LazyWeight | None:
        """Return a weight of all experts of a layer, from one tensor of each kind or from one of each expert."""
        block, suffix = self._names.get_name(f"{parent}.gate"), "bias" if attribute.endswith("_bias") else "weight"
        block = str(block or self._names.get_name(f"{parent}.router")).rpartition(".")[0]
        tensors = {kind: [f"{block}.ffn_{kind}_exps.{suffix}"] for kind in STACKED[attribute]}
        count = expert_count(self._config)
        for kind, names in tensors.items():
            if names[0] not in self._file.tensors:
                tensors[kind] = [f"{block}.ffn_{kind}.{expert}.{suffix}" for expert in range(count)]
        names = [name for each in tensors.values() for name in each]
        if not {*names} <= self._file.tensors.keys():
            return None
        shapes = {self._slice_shape(name) for name in names}
        stacked = {self._file.tensors[name].shape[0] for name in names if "_exps." in name}
        if len(shapes) > 1 or not stacked <= {count} or () in shapes:
            listed = ", ".join(f"{name} {list(self._file.tensors[name].shape)}" for name in names[:3])
            raise UnsupportedModelError(f"{self._file.path}: tensors do not hold {count} equal experts: {listed}")
        rows, *columns = shapes.pop()
        shape = (count, len(tensors) * rows, *columns)
        turned = shape if suffix == "bias" or self._config.model_type != "gpt_oss" else (shape[0], *shape[:0:-1])
        return LazyWeight(names, turned, lambda: self._quantized(tensors, shape) or self._join(tensors, shape, turned))

    def _slice_shape(self, name: str) -> tuple[int, ...]:
        shape = self._file.tensors[name].shape
        return shape[1:] if "_exps." in name else shape

    def _quantized(self, tensors: Mapping[str, list[str]], shape: Sequence[int]) -> Quantized | None:
        """Read experts of one quantization type: the rows of each in turn. None if they cannot stay quantized."""
        kinds = [self._file.tensors[name].qtype.name for names in tensors.values() for name in names]
        is_gpt_oss = self._config.model_type == "gpt_oss"  # its gates and ups take turns
        if is_gpt_oss or len({*kinds}) > 1 or kinds[0] not in QUANTIZATION_TYPES:
            self.dequantized.update(kind for kind in kinds if kind in QUANTIZATION_TYPES)
            return None
        parts: Any = [[self._file.read(name) for name in names] for names in tensors.values()]
        rows = [torch.cat([part.data for part in each]).unflatten(0, (shape[0], -1)) for each in parts]
        return Quantized(QUANTIZATION_TYPES[kinds[0]], torch.cat(rows, 1).flatten(0, 1))

    def _join(self, tensors: Mapping[str, list[str]], shape: Sequence[int], turned: Sequence[int]) -> torch.Tensor:
        """Read the experts one by one into a weight: gate rows, then up rows; GPT-OSS interleaves and transposes."""
        weight, is_gpt_oss = torch.empty(tuple(turned)), self._config.model_type == "gpt_oss"
        rows = weight.transpose(1, 2) if is_gpt_oss and weight.dim() == 3 else weight  # [experts, rows, columns]
        kinds, size = len(tensors), shape[1] // len(tensors)
        for index, names in enumerate(tensors.values()):
            place = slice(index, None, kinds) if is_gpt_oss else slice(index * size, (index + 1) * size)
            for expert, part in enumerate(self._slices(names)):
                rows[expert, place] = part
        return weight

    def _slices(self, names: list[str]) -> Iterator[torch.Tensor]:
        if "_exps." in names[0]:
            yield from self._file.slices(names[0])
        else:
            for name in names:
                yield as_tensor(self._file.read(name))


def _rotated(weight: Weight, heads: int) -> Weight:
    """Return the rows in transformers' order; GGUF files interleave the two halves of a rotated head."""
    rows = torch.arange(weight.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
    return weight.rows(rows) if isinstance(weight, Quantized) else weight[rows]


def _transposed(weight: Weight) -> torch.Tensor:
    return as_tensor(weight).T.contiguous()
