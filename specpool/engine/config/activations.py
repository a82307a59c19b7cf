"""The option `activations`: the format of activations in GEMMs with quantized weights."""

from collections.abc import Iterable, Mapping
from typing import Literal

from specpool.engine.config.sources import UnsupportedModelError

Activations = Literal["auto", "float32", "int8"]

FLOAT32: Literal["float32"] = "float32"
INT8: Literal["int8"] = "int8"


def int8_refusal(needed: str, remedy: str = "", role: str = "") -> str:
    """The error message if a requirement of int8 activations is not met.

    `remedy`: what helps besides other activations. `role`: begins the names of the settings, such as "target-".
    """
    return (
        f"{role}activations: int8 needs {needed}; {remedy and f'{remedy}, or '}set {role}activations to auto or float32"
    )


class Int8RefusedError(UnsupportedModelError):
    """The model cannot have the int8 activations that are required. `needed`, `remedy`: as in `int8_refusal`."""

    def __init__(self, needed: str, remedy: str = "") -> None:
        super().__init__(needed, remedy)
        self.needed, self.remedy = needed, remedy

    def __str__(self) -> str:
        return int8_refusal(self.needed, self.remedy)


def check_int8(
    role: str = "",
    *,
    devices: Mapping[str, Iterable[str]],
    native: bool = True,
    fused: bool = True,
    weights: str = "auto",
    dtype: str = "auto",
) -> None:
    """Raise ValueError if other options rule out int8 activations.

    `role`: as in `int8_refusal`. `devices`: by flag, such as "--standby-devices".
    """
    needed = {
        f"--{role}native": native,
        f"--{role}fused": fused,
        f"--{role}weights auto": weights == "auto",
        f"--{role}dtype float32": dtype in ("auto", "float32"),
        **{f"{flag} cpu": not any(name.startswith("cuda") for name in names) for flag, names in devices.items()},
    }
    missing = next((option for option, is_met in needed.items() if not is_met), None)
    if missing is not None:
        raise ValueError(int8_refusal(missing, role=role))
