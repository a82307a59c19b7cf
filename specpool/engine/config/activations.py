"""The option `activations`: in which format activations enter GEMMs with quantized weights."""

from typing import Literal

Activations = Literal["auto", "float32", "int8"]

FLOAT32: Literal["float32"] = "float32"
INT8: Literal["int8"] = "int8"


def int8_refusal(needed: str, remedy: str = "", role: str = "") -> str:
    """Say what int8 activations need that is missing, and what to do.

    `remedy`: what helps besides other activations. `role`: begins the names of the flags, such as "target-".
    """
    return (
        f"{role}activations: int8 needs {needed}; {remedy and f'{remedy}, or '}use --{role}activations auto or float32"
    )
