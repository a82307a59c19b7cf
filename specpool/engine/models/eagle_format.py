"""Reads the kind of an EAGLE head from its configuration. Imports no torch.

Formats are that of the EAGLE authors, NVIDIA's extension of it (`eagle_config`), and that of the speculators library,
which keeps the sizes of the layers in `transformer_layer_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specpool.engine.config.sources import UnsupportedModelError

SPECULATOR, SPECULATOR_LAYERS = "speculators_model_type", "transformer_layer_config"
STATE_LAYERS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
REQUIRED: Mapping[str, object] = MappingProxyType(
    {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "parallel_drafting": False,
        "parallel_draft_step": 1,
    }
)
"""Settings that must have these values if they are present."""


@dataclass(frozen=True)
class EagleFormat:
    """The states that a head reads, and where it applies norms. The flags of norms are EAGLE-3.1's."""

    is_eagle3: bool
    layers: tuple[int, ...]
    """The head reads the target's states after this many layers."""
    norm_before_residual: bool = False
    """The first layer adds its branches to the normalized states, not to the states."""
    norm_before_fc: bool = False
    """One norm of all the target's states together, before they are projected."""
    fc_norm: bool = False
    """A norm of the states after each layer, before they are projected."""
    norm_output: bool = False
    """The head's own states are those after its final norm."""


def format_of(config: Any, is_eagle3: bool, num_layers: int) -> EagleFormat:
    """The format of a head for a target with `num_layers` layers. Raises UnsupportedModelError."""
    stated = getattr(config, "eagle_config", None)
    extended: Mapping[str, Any] = stated if isinstance(stated, dict) else {}

    def read(name: str) -> Any:
        value = getattr(config, name, None)
        return extended.get(name) if value is None else value

    flags = {name: read(name) or False for name in FLAGS}
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise UnsupportedModelError(f"{name} is not true or false: {flag!r}"[:200])
    if not is_eagle3:
        if any(flags.values()):
            raise UnsupportedModelError(f"{', '.join(name for name in FLAGS if flags[name])}: only for EAGLE-3 heads")
        return EagleFormat(False, (num_layers,))
    for name, required in REQUIRED.items():
        if (value := read(name)) is not None and value != required:
            raise UnsupportedModelError(f"EAGLE-3 heads with {name}={value!r} are not supported"[:200])
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise UnsupportedModelError("EAGLE-3 heads with both norm_before_fc and fc_norm are not supported")
    layers = _layers_of(config, extended, num_layers)
    if not all(0 < layer <= num_layers for layer in layers):
        raise UnsupportedModelError(f"it reads layers {[*layers]} of a target with {num_layers} layers")
    return EagleFormat(True, layers, **flags)


def _layers_of(config: Any, extended: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    ids, after = extended.get(STATE_LAYERS), 1  # layers whose outputs are read, counted from 0
    if not ids:  # layers whose inputs are read, as in the speculators library
        ids, after = getattr(config, STATE_LAYERS, None), 0
    if not ids:
        return 2, num_layers // 2, num_layers - 3
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise UnsupportedModelError(f"{STATE_LAYERS} is not a list of layers: {ids!r}"[:200])
    return tuple(number + after for number in ids)


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """Merge the layers' and the head's settings of a configuration in the format of the speculators library.

    Other configurations are returned unchanged. UnsupportedModelError: it is not an EAGLE-3 head.
    """
    layers = config.get(SPECULATOR_LAYERS)
    if not isinstance(layers, dict):
        return config
    if (kind := config.get(SPECULATOR)) != "eagle3":
        raise UnsupportedModelError(f"{SPECULATOR} is {kind!r}; only eagle3 is supported"[:200])
    own = (SPECULATOR, STATE_LAYERS, "dtype", "torch_dtype", *FLAGS, *REQUIRED)
    settings = {name: config[name] for name in own if config.get(name) is not None}
    return {name: value for name, value in layers.items() if name != "architectures"} | settings
