"""Models whose weights can stay as they are in their files: GGUF files, and trained drafts."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, gguf_file_of
from specpool.engine.models.compact import find_named
from specpool.engine.models.gguf_file import GgufFile
from specpool.engine.models.quantization import CODED, method_of
from specpool.engine.passes.fused import why_not_fusable
from specpool.engine.sharding.weights import ShardConfig, adapt
from specpool.engine.weights.quantized import (
    Quantized,
    QuantizedEmbedding,
    QuantizedLinear,
    Weight,
    as_tensor,
    linear_of,
    same_memory,
)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Architectures whose tensors are those of transformers, but for names and the order of rows in some of those of Llama.
SAME_TENSORS = {"llama", "qwen2", "qwen3"}
ROTATED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
# What the metadata of a GGUF file says of the sizes of its model, and the names of these in a configuration.
SIZES = {
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
ROPE_FREQS, ROPE_SCALING = "rope_freqs.weight", "rope.scaling.type"


class StoredWeights(ABC):
    """The weights of a model by the names that transformers gives them."""

    method: str
    """The way in which they are quantized."""
    folder: Path
    """Where the files of the model are."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the tensors in the file."""
        self._unread = set(names)

    @abstractmethod
    def find(self, name: str) -> Weight | None:
        """A weight; None if it is not there. ValueError if it cannot be read."""

    @property
    def unread(self) -> list[str]:
        """The names, in the file, of the tensors that were not found by any name of a weight so far."""
        return sorted(self._unread)

    @property
    def unpacked(self) -> Mapping[str, int]:
        """Kinds of quantized weights that are only read as float32, and how many weights have them."""
        return {}


class GgufWeights(StoredWeights):
    """Those of a GGUF file of one of the architectures in SAME_TENSORS."""

    method = "GGUF"

    def __init__(self, file: GgufFile, config: PreTrainedConfig) -> None:
        """UnsupportedModelError if the configuration is that of another model than the file's."""
        super().__init__(file.tensors.keys() - {ROPE_FREQS})
        _refuse_other_sizes(file, config)
        _refuse_other_rotations(file, config)
        self._file, self._config, self.folder = file, config, file.path.parent
        (architecture,) = (its for its in MODEL_ARCH if MODEL_ARCH_NAMES[its] == file.architecture)
        self._names = get_tensor_name_map(architecture, config.num_hidden_layers)

    def find(self, name: str) -> Weight | None:
        """A weight; its rows in the order that they have in transformers."""
        stem, _, suffix = name.rpartition(".")
        tensor = f"{self._names.get_name(stem)}.{suffix}"
        if tensor not in self._file.tensors:
            return None
        self._unread.discard(tensor)
        weight = self._file.read(tensor)
        module = stem.rpartition(".")[2]
        if self._file.architecture != "llama" or module not in ROTATED:
            return weight
        rows = _rotary_order(weight.shape[0], getattr(self._config, ROTATED[module]))
        return weight.rows(rows) if isinstance(weight, Quantized) else weight[rows]

    @property
    def unpacked(self) -> Mapping[str, int]:
        """Types of the file's quantized tensors that are not among KINDS."""
        return self._file.unpacked_kinds


class QuantizedStoredWeights(StoredWeights):
    """Weights written by `specpool.engine.models.trained_draft`. The name of a byte tensor ends in its kind."""

    method = "int8"

    def __init__(self, file: Path) -> None:
        """ValueError or OSError for a file that is no such file."""
        self.folder = file.parent
        self._file = safe_open(file, framework="pt")
        self._names = tuple(self._file.keys())
        super().__init__(self._names)

    def find(self, name: str) -> Weight | None:
        """A weight."""
        of_name = {key for key in self._names if key == name or key.rpartition(".")[0] == name}
        self._unread -= of_name
        return find_named({key: self._file.get_tensor(key) for key in of_name}, name)


def stored_weights(options: EngineOptions, config: PreTrainedConfig) -> StoredWeights | None:
    """The weights of a model that need not be unpacked; None if transformers must read them. ValueError; OSError."""
    gguf = gguf_file_of(options.model)
    if gguf is not None:
        file = GgufFile(gguf)
        same = file.architecture in SAME_TENSORS and why_not_fusable(config) is None
        return GgufWeights(file, config) if same else None
    return QuantizedStoredWeights(Path(options.model) / "model.safetensors") if method_of(config) == CODED else None


def read_stored(
    stored: StoredWeights,
    config: PreTrainedConfig,
    asked: ShardConfig | None = None,
    dtype: torch.dtype = torch.float32,
    **others: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The library's model with these weights, and a report like that of transformers.

    `asked`: the share of a rank, if the model is divided; `dtype`: that its weights will have in the end. `others`:
    further arguments for the library's class. UnsupportedModelError; ValueError.
    """
    with init_empty_weights(include_buffers=False):  # buffers are computed, not stored
        model: Any = AutoModelForCausalLM.from_config(config, **others)
    model.tie_weights()  # again, since each of the two has become one of its own
    if (stored.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(stored.folder)
    report: dict[str, Any] = {"missing_keys": [], "mismatched_keys": []}
    for name, wanted in list(model.named_parameters()):
        weight = stored.find(name)
        if weight is None:
            report["missing_keys"].append(name)
        elif tuple(weight.shape) != tuple(wanted.shape):
            report["mismatched_keys"].append((name, tuple(weight.shape), tuple(wanted.shape)))
        else:
            _place(model, name, weight if asked is None else asked.share_of(name, weight, dtype))
    if config.tie_word_embeddings:
        _refuse_another_head(stored)
        _place(model, HEAD, model.get_input_embeddings().weight)
    if asked is not None:
        adapt(model, asked.share)
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if left:
        raise UnsupportedModelError(f"{config.model_type} has a table that is not computed when it is made: {left[0]}")
    return model, {**report, "unexpected_keys": stored.unread}


def _refuse_other_sizes(file: GgufFile, config: PreTrainedConfig) -> None:
    """Refuses a configuration that does not belong to its file."""
    for key, name in SIZES.items():
        size, configured = file.metadata.get(f"{file.architecture}.{key}"), getattr(config, name, None)
        if None not in (size, configured) and size != configured:
            raise UnsupportedModelError(
                f"the configuration is that of another model than {file.path.name}: "
                f"{name} is {configured}, but the file's {key} is {size}"
            )


def _refuse_other_rotations(file: GgufFile, config: Any) -> None:
    """Refuses a file of a model whose positions are scaled beside a configuration that does not say so: transformers
    reads no scaling from a file."""
    scaling, key = file.metadata.get(f"{file.architecture}.{ROPE_SCALING}"), ROPE_FREQS
    if scaling not in (None, "none"):
        key = f"{file.architecture}.{ROPE_SCALING} ({scaling})"
    elif ROPE_FREQS not in file.tensors or bool((as_tensor(file.read(ROPE_FREQS)) == 1).all()):
        return
    if (config.rope_parameters or {}).get("rope_type", "default") == "default":
        raise UnsupportedModelError(
            f"its rotary embedding is scaled, as {key} of {file.path.name} says, but its configuration does not say "
            "how; serve the folder with the model's own config.json instead"
        )


def _refuse_another_head(stored: StoredWeights) -> None:
    """Refuses an output head of a file whose configuration says that the head is that of the embeddings."""
    head, embedding = stored.find(HEAD), stored.find(EMBEDDING)
    if head is None or embedding is None:
        return
    if head.shape != embedding.shape or not torch.equal(as_tensor(head), as_tensor(embedding)):
        raise UnsupportedModelError(
            "its file has an output head that differs from its embeddings, but its configuration has "
            "tie_word_embeddings, which says that they are the same"
        )


def _place(model: nn.Module, name: str, weight: Weight) -> None:
    """Gives a model a weight, and the module that it needs. Biases come after the weights of their modules."""
    path, _, attribute = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if isinstance(weight, Quantized) and type(module) is nn.Linear:
        model.set_submodule(path, QuantizedLinear([weight]))
    elif isinstance(weight, Quantized) and type(module) is nn.Embedding:  # others do more than to look up
        model.set_submodule(path, QuantizedEmbedding(weight))
    else:
        setattr(module, attribute, nn.Parameter(as_tensor(weight).detach().float(), requires_grad=False))


def decode_model(model: Any, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Dequantizes the weights of a model one after the other, and moves it to a device."""
    # An output head for some tokens is one of its own, whatever the configuration says.
    tied = same_memory(model.get_input_embeddings().weight, model.get_output_embeddings())
    for path, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            weight = module.weight.to(device, dtype)
            model.set_submodule(path, linear_of(weight, module.bias))
        elif isinstance(module, QuantizedEmbedding):
            weight = module.weight.dequantized().to(device, dtype)
            model.set_submodule(path, nn.Embedding.from_pretrained(weight))
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    decoded: PreTrainedModel = model.to(device)
    return decoded


def _rotary_order(rows: int, heads: int) -> torch.Tensor:
    """The row of a GGUF file for each row: there, the two features that are rotated together are neighbours."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
