"""Elementwise functions that several kernels use, in float32. Requires Triton."""

from typing import Any

from specpool.engine.numerics.triton_compat import tl, triton
from specpool.engine.passes.kinds import Activation

# GELU is x * sigmoid(x * (LINEAR + CUBIC * x * x)) in its tanh approximation: 2 * sqrt(2 / pi) * (1, 0.044715).
_LINEAR, _CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.07135481627260025)


def options_of(activation: Activation) -> dict[str, Any]:
    """Return the compile options of `activated`."""
    is_gelu = activation.function == "gelu_tanh"
    return {"GELU": is_gelu, "ALPHA": activation.alpha, "LIMIT": activation.limit, "SHIFT": activation.shift}


@triton.jit
def activated(gate, up, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """Combine gate and up as an `Activation` says. NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    x = gate
    if GELU:
        x = gate * (gate * gate * _CUBIC + _LINEAR)
    elif ALPHA != 1.0:
        x = gate * ALPHA
    if SHIFT != 0.0:
        up += SHIFT
    return gate / (1 + tl.exp(-x)) * up


@triton.jit
def softcapped(x, SOFTCAP: tl.constexpr):
    """Return SOFTCAP * tanh(x / SOFTCAP)."""
    return SOFTCAP - 2 * SOFTCAP / (1 + tl.exp(x * (2 / SOFTCAP)))
