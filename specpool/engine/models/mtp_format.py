"""Where checkpoints keep their multi-token prediction (MTP) layer. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specpool.engine.config.architectures import DELTA_NETS, MODELS_PAGE

FC, EMBEDDING_NORM, STATE_NORM = "fc.weight", "embedding_norm.weight", "state_norm.weight"
"""Our names for the linear layer that joins an embedding and a state, and for the norms before it."""
MTP_FILES = "MTP layers are read from safetensors files"
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Configuration keys with the number of MTP layers."""


@dataclass(frozen=True)
class MtpLayout:
    """The names of the weights of the first MTP layer."""

    prefix: str
    """Beginning of all names."""
    replacements: Mapping[str, str]
    """How names continue after the prefix, and how they begin in a model of one layer. The first match counts."""

    def own_name(self, stored: str) -> str | None:
        """Return our name for a stored weight; None if it does not belong to the layer."""
        if not stored.startswith(self.prefix):
            return None
        name = stored.removeprefix(self.prefix)
        return _replaced(name, self.replacements) or (None if name.startswith("layers.") else name)

    def stored_name(self, own: str) -> str:
        """Return the name under which files keep one of our weights."""
        return self.prefix + (_replaced(own, {new: old for old, new in self.replacements.items()}) or own)


def _replaced(name: str, replacements: Mapping[str, str]) -> str | None:
    return next((new + name.removeprefix(old) for old, new in replacements.items() if name.startswith(old)), None)


_LAST_LAYER = MtpLayout(
    "model.layers.{num_hidden_layers}.",
    MappingProxyType(
        {
            "eh_proj.": "fc.",
            "enorm.": "embedding_norm.",
            "hnorm.": "state_norm.",
            "embed_tokens.": "model.embed_tokens.",
            "shared_head.norm.": "model.norm.",
            "shared_head.head.": "lm_head.",
            "": "model.layers.0.",
        }
    ),
)
_APART = MtpLayout(
    "mtp.",
    MappingProxyType(
        {
            "fc.": "fc.",
            "pre_fc_norm_embedding.": "embedding_norm.",
            "pre_fc_norm_hidden.": "state_norm.",
            "embed_tokens.": "model.embed_tokens.",
            "norm.": "model.norm.",
            "layers.0.": "model.layers.0.",
        }
    ),
)
_LAYOUTS: Mapping[str, MtpLayout] = MappingProxyType(
    {
        **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v3"), _LAST_LAYER),
        **dict.fromkeys(sorted(DELTA_NETS), _APART),
    }
)


def mtp_layout(model_type: str, num_layers: int) -> MtpLayout:
    """Return the names in checkpoints of this model type. `num_layers`: of the target."""
    layout = _LAYOUTS[model_type]
    return MtpLayout(layout.prefix.format(num_hidden_layers=num_layers), layout.replacements)


def no_mtp_weights(model: str, prefix: str) -> str:
    """Return the error message for a target whose files lack the layer."""
    return f"{model} has no MTP layer: no weights begin with {prefix}; quantized copies often leave it out"


def why_no_mtp(read: Callable[[str], object]) -> str | None:
    """Return why a target with this configuration has no MTP layer that can draft; None if it may have one.

    `read`: returns a value of config.json or of a transformers configuration by key; None if the key is missing.
    """
    model_type = read("model_type")
    if model_type not in _LAYOUTS:
        return f"MTP layers are supported for {', '.join(_LAYOUTS)}, not for {model_type}; {MODELS_PAGE}"
    empty = next((name for name in _COUNTS if read(name) == 0), None)
    return None if empty is None else f"the target has no MTP layer: its {empty} is 0"
