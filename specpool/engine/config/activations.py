"""The option `activations`: the format of activations in GEMMs with quantized weights."""

from collections.abc import Iterable
from typing import Literal

Activations = Literal["auto", "float32", "int8"]

FLOAT32: Literal["float32"] = "float32"
INT8: Literal["int8"] = "int8"


def int8_refusal(needed: str, remedy: str = "", role: str = "") -> str:
    """The error message if a requirement of int8 activations is not met.

    `needed`: the requirement. `remedy`: how to meet it. `role`: prefix of the flags, such as "target-".
    """
    return (
        f"{role}activations: int8 needs {needed}; {remedy and f'{remedy}, or '}use --{role}activations auto or float32"
    )


def check_int8(
    role: str = "",
    *,
    native: bool = True,
    fused: bool = True,
    weights: str = "auto",
    dtype: str = "auto",
    devices: Iterable[str] = (),
) -> None:
    """Raise ValueError if other options rule out int8 activations. `role`: as in `int8_refusal`."""
    needed = {
        "native": native,
        "fused": fused,
        "weights auto": weights == "auto",
        "dtype float32": dtype in ("auto", "float32"),
        "device cpu": not any(device.startswith("cuda") for device in devices),
    }
    missing = next((option for option, is_met in needed.items() if not is_met), None)
    if missing is not None:
        raise ValueError(int8_refusal(f"--{role}{missing}", role=role))
