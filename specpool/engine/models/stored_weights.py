"""Reads weights as stored, quantized or not, from GGUF files, trained drafts and packed-integer checkpoints."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from specpool.engine.config.architectures import KIMI_LINEAR
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import gguf_file_of
from specpool.engine.models.checkpoint_quantization import DRAFT_METHOD, format_of, method_of
from specpool.engine.models.draft_weights import find_named
from specpool.engine.models.gguf_keys import check_config, ignored_tensors
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.models.gguf_rope import ROPE_TENSORS
from specpool.engine.models.gguf_tensors import LazyWeight, TensorNames
from specpool.engine.models.packed_weights import PackedWeight, packed_weights
from specpool.engine.models.weight_files import check_layers, safetensors_files, stored_sizes
from specpool.engine.passes.families import MIXTURES, is_fusable
from specpool.engine.weights.quantized import Quantized, Weight, as_tensor

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Architectures whose files are read as stored on any device. Other fast families are, if weights stay quantized.
GGUF_ARCHITECTURES = {"llama", "qwen2", "qwen3"}
# Parameters that hold the rows of all experts, and the projections that they combine.
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Parts of names in Mixtral checkpoints, and their replacements in transformers.
BLOCK = ".block_sparse_moe."
MIXTRAL = {BLOCK: ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}


class StoredWeights(ABC):
    """A model's weights by their transformers names."""

    method: str  # quantization method, for messages
    folder: Path  # folder with the model's files

    def __init__(self, names: Collection[str]) -> None:
        """`names`: tensors in the file."""
        self._unread = set(names)
        self.dequantized: Counter[str] = Counter()
        """Number of weights by quantization type, for types that are dequantized when read."""

    @abstractmethod
    def find(self, name: str) -> Weight | None:
        """Return a weight; None if it is missing. Raises ValueError if it cannot be read."""

    def generation_config(self) -> GenerationConfig | None:
        if not (self.folder / GENERATION_CONFIG_NAME).is_file():
            return None
        return GenerationConfig.from_pretrained(self.folder)

    @property
    def unread(self) -> list[str]:
        """Tensors of the file that `find` has not returned yet."""
        return sorted(self._unread)


class GgufWeights(StoredWeights):
    """The weights of a GGUF file."""

    method = "GGUF"

    def __init__(self, file: GgufFile, config: PreTrainedConfig) -> None:
        """Raise UnsupportedModelError if the configuration does not match the file, GgufError for unsupported types."""
        file.check_types()
        super().__init__(file.tensors.keys() - ROPE_TENSORS - ignored_tensors(file))
        check_config(file, config)
        self._names, self.folder = TensorNames(file, config), file.path.parent
        self.dequantized = self._names.dequantized

    def find(self, name: str) -> Weight | None:
        """Return a weight with its rows in transformers' order."""
        weight = self._find(name)
        return None if weight is None else weight.read()

    def lazy(self, names: Collection[str]) -> dict[str, LazyWeight]:
        """Return the weights that the file has, by name; read each as `weight[...]`. Raises UnsupportedModelError."""
        found = {name: self._find(name) for name in names}
        return {name: weight for name, weight in found.items() if weight is not None}

    def _find(self, name: str) -> LazyWeight | None:
        weight = self._names.find(name)
        if weight is not None:
            self._unread.difference_update(weight.tensors)
        return weight


class DraftWeights(StoredWeights):
    """The weights of a trained draft (`specpool.engine.models.draft_folder`)."""

    method = "quantized"

    def __init__(self, file: Path) -> None:
        """Raise ValueError or OSError for an invalid file."""
        self.folder = file.parent
        self._file = safe_open(file, framework="pt")
        self._names = tuple(self._file.keys())
        super().__init__(self._names)

    def find(self, name: str) -> Weight | None:
        stored = {key for key in self._names if key == name or key.rpartition(".")[0] == name}
        self._unread -= stored
        return find_named({key: self._file.get_tensor(key) for key in stored}, name)


class IntegerWeights(StoredWeights):
    """Weights of a packed-integer checkpoint. They stay quantized if compiled passes can use them."""

    def __init__(self, options: EngineOptions, config: PreTrainedConfig, weights: Mapping[str, Any]) -> None:
        """`weights`: see `packed_weights`."""
        super().__init__(())  # unused weights are accepted, as in transformers
        self.method, self.dequantized = str(method_of(config)), Counter()
        self._options = options
        self._weights = {_expert_name(name): weight for name, weight in weights.items()}

    def has_parameters_of(self, config: PreTrainedConfig) -> bool:
        """Return whether the names are those of transformers, as far as `find` can tell without reading."""
        if config.model_type == KIMI_LINEAR:  # transformers joins and renames the weights of its delta nets
            return False
        has_experts = any(".mlp.experts.0.gate_proj." in name for name in self._weights)
        return EMBEDDING in self._weights and (has_experts or config.model_type not in MIXTURES)

    def find(self, name: str) -> Weight | None:
        """Return a weight. A weight of all experts has two dimensions: the rows of each expert in turn."""
        module, _, projection = name.rpartition(".")
        if module.endswith(".experts"):
            return self._find_experts(module, EXPERTS[projection])
        found = self._weights.get(name)
        if not isinstance(found, PackedWeight):
            return None if found is None else found[...]
        weight = found.read()
        if not isinstance(weight, Quantized):
            self.dequantized[self.method] += 1
        return weight

    def _find_experts(self, module: str, projections: Sequence[str]) -> Weight | None:
        experts = (self.find(f"{module}.{index}.{name}.weight") for index in count() for name in projections)
        parts = list(takewhile(lambda part: part is not None, experts))
        shapes = {tuple(part.shape) for part in parts if part is not None}
        if len(shapes) > 1 or len(parts) % len(projections):
            raise ValueError(f"{module} have different shapes or lack weights")
        quantized = [part for part in parts if isinstance(part, Quantized)]
        if parts and len(quantized) == len(parts) and len({part.qtype.name for part in quantized}) == 1:
            return Quantized(quantized[0].qtype, torch.cat([part.data for part in quantized]))
        if quantized:
            self.dequantized[self.method] += len(quantized)
        return torch.cat([as_tensor(part).float() for part in parts if part is not None]) if parts else None

    def generation_config(self) -> GenerationConfig | None:
        return read_generation_config(self._options)


def read_generation_config(options: EngineOptions) -> GenerationConfig | None:
    """Return a model's generation_config.json, from its folder or the hub; None if it has none."""
    gguf = gguf_file_of(options.model)
    source = options.model if gguf is None else gguf.parent
    try:
        return GenerationConfig.from_pretrained(source, revision=options.revision or "main")
    except OSError:
        return None


def stored_weights(
    options: EngineOptions, config: PreTrainedConfig, keeps_quantized: bool = False
) -> StoredWeights | None:
    """Open weights that can stay as stored; None if transformers must read them.

    `keeps_quantized`: whether the pass supports quantized weights. Raises UnsupportedModelError, ValueError or
    OSError.
    """
    gguf = gguf_file_of(options.model)
    if gguf is not None:
        file = GgufFile(gguf)
        check_layers(config, len(file.tensors))
        dense = file.architecture in GGUF_ARCHITECTURES and config.model_type not in MIXTURES
        return GgufWeights(file, config) if is_fusable(config) and (dense or keeps_quantized) else None
    stored = stored_sizes(options)
    if stored is not None:
        check_layers(config, stored.tensors)
    packed = format_of(config)
    if keeps_quantized and packed is not None and packed.integers:
        weights = packed_weights(safetensors_files(options), packed)
        integers = IntegerWeights(options, config, weights)
        if integers.has_parameters_of(config):
            return integers
        return None
    return DraftWeights(Path(options.model) / "model.safetensors") if method_of(config) == DRAFT_METHOD else None


def _expert_name(name: str) -> str:
    if BLOCK not in name:
        return name
    for old, new in MIXTRAL.items():
        name = name.replace(old, new)
    return name
