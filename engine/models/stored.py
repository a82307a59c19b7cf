"""Models whose weights can stay as they are in their files: GGUF files, and trained drafts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from engine.models.compact import find_named
from engine.models.gguf_file import GgufFile
from engine.models.quantization import CODED, method_of
from engine.models.sources import gguf_file_of
from engine.options import EngineOptions
from engine.parallel.weights import ShardConfig, adapt
from engine.passes.lean import why_not_lean
from engine.weights.coded import Coded, CodedEmbedding, CodedLinear, Weight, as_tensor, linear_of, same_memory

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Architectures whose tensors are those of transformers, but for names and the order of rows in some of those of Llama.
SAME_TENSORS = {"llama", "qwen2", "qwen3"}
ROTATED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


class StoredWeights(ABC):
    """The weights of a model by the names that transformers gives them."""

    method: str
    """The way in which they are quantized."""
    folder: Path
    """Where the files of the model are."""

    @abstractmethod
    def find(self, name: str) -> Weight | None:
        """A weight; None if it is not there."""

    @property
    def unpacked(self) -> Mapping[str, int]:
        """Kinds of quantized weights that are only read as float32, and how many weights have them."""
        return {}


class GgufWeights(StoredWeights):
    """Those of a GGUF file of one of the architectures in SAME_TENSORS."""

    method = "GGUF"

    def __init__(self, file: GgufFile, config: PreTrainedConfig) -> None:
        self._file, self._config, self.folder = file, config, file.path.parent
        (architecture,) = (its for its in MODEL_ARCH if MODEL_ARCH_NAMES[its] == file.architecture)
        self._names = get_tensor_name_map(architecture, config.num_hidden_layers)

    def find(self, name: str) -> Weight | None:
        """A weight; its rows in the order that they have in transformers."""
        stem, _, suffix = name.rpartition(".")
        tensor = f"{self._names.get_name(stem)}.{suffix}"
        if tensor not in self._file.tensors:
            return None
        weight = self._file.read(tensor)
        module = stem.rpartition(".")[2]
        if self._file.architecture != "llama" or module not in ROTATED:
            return weight
        rows = _rotary_order(weight.shape[0], getattr(self._config, ROTATED[module]))
        return weight.rows(rows) if isinstance(weight, Coded) else weight[rows]

    @property
    def unpacked(self) -> Mapping[str, int]:
        """Types of the file's quantized tensors that are not among KINDS."""
        return self._file.unpacked_kinds


class CodedWeights(StoredWeights):
    """Those of a folder that `engine.models.trained_draft` has written: a tensor of bytes has its kind in its name."""

    method = "int8"

    def __init__(self, file: Path) -> None:
        """ValueError or OSError for a file that is no such file."""
        self._file, self.folder = file, file.parent
        with safe_open(file, framework="pt") as stored:
            self._names = set(stored.keys())

    def find(self, name: str) -> Weight | None:
        """A weight."""
        with safe_open(self._file, framework="pt") as stored:
            return find_named({key: stored.get_tensor(key) for key in self._names if key.startswith(name)}, name)


def stored_weights(options: EngineOptions, config: PreTrainedConfig) -> StoredWeights | None:
    """The weights of a model that need not be unpacked; None if transformers must read them. ValueError; OSError."""
    gguf = gguf_file_of(options.model)
    if gguf is not None:
        file = GgufFile(gguf)
        same = file.architecture in SAME_TENSORS and why_not_lean(config) is None
        return GgufWeights(file, config) if same else None
    return CodedWeights(Path(options.model) / "model.safetensors") if method_of(config) == CODED else None


def read_stored(
    stored: StoredWeights, config: PreTrainedConfig, asked: ShardConfig | None = None, **others: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The library's model with these weights, and a report like that of transformers.

    `asked`: the share of a rank, if the model is divided. `others`: further arguments for the library's class.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, **others)
    if (stored.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(stored.folder)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its tables are computed, not stored
    report: dict[str, Any] = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}
    for name, wanted in list(model.named_parameters()):
        weight = stored.find(name)
        if weight is None:
            report["missing_keys"].append(name)
        elif tuple(weight.shape) != tuple(wanted.shape):
            report["mismatched_keys"].append((name, tuple(weight.shape), tuple(wanted.shape)))
        else:
            _place(model, name, weight if asked is None else asked.share_of(name, weight))
    if config.tie_word_embeddings:
        _place(model, HEAD, model.get_input_embeddings().weight)
    if asked is not None:
        adapt(model, asked.share)
    return model, report


def _place(model: nn.Module, name: str, weight: Weight) -> None:
    """Gives a model a weight, and the module that it needs. Biases come after the weights of their modules."""
    path, _, attribute = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if isinstance(weight, Coded) and isinstance(module, nn.Linear):
        model.set_submodule(path, CodedLinear([weight]))
    elif isinstance(weight, Coded) and isinstance(module, nn.Embedding):
        model.set_submodule(path, CodedEmbedding(weight))
    else:
        setattr(module, attribute, nn.Parameter(as_tensor(weight).detach().float(), requires_grad=False))


def decode_model(model: Any, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Dequantizes the weights of a model one after the other, and moves it to a device."""
    # An output head for some tokens is one of its own, whatever the configuration says.
    tied = same_memory(model.get_input_embeddings().weight, model.get_output_embeddings())
    for path, module in list(model.named_modules()):
        if isinstance(module, CodedLinear):
            weight = module.weight.to(device, dtype)
            model.set_submodule(path, linear_of(weight, module.bias))
        elif isinstance(module, CodedEmbedding):
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
