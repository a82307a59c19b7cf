"""Logarithms and exponentials with the same bits on every device, for any number of threads and any slicing.

They use only integer operations, and float32 multiplications and additions in a fixed order: IEEE 754 defines how these
round. Torch's own functions can differ in the last bit between devices, and on a CPU between vector lanes and the
remainder. `triton_elementary` holds the same formulas for Triton kernels.

The reductions and the split of log(2) come from the Cephes library; the polynomials are minimax fits.
"""

import torch

# Bits of the float32 nearest sqrt(1/2); mantissas range from there to sqrt(2).
SQRT_HALF_BITS = 0x3F3504F3
MANTISSA_BITS, MANTISSA_MASK = 23, (1 << 23) - 1
# High and low part of log(2). The high part has few bits, so multiplying it by an exponent is exact.
LOG2_HIGH, LOG2_LOW = 0.693359375, -2.1219444170128554e-4
# log(1 + f) = f - f**2 / 2 + f**3 * polynomial(f), highest power first.
LOG_TERMS = (
    0.08700393885374069, -0.14267481863498688, 0.14914777874946594, -0.1657758504152298, 0.19963063299655914,
    -0.2500133812427521, 0.3333390951156616,
)  # fmt: skip
# exp(r) = 1 + r + r**2 * polynomial(r).
EXP_TERMS = (0.008312055841088295, 0.04189445078372955, 0.16667133569717407, 0.4999920129776001)
LOG2_E = 1.4426950216293335
# Adding this rounds to an integer, which ends up in the low bits of the sum.
ROUNDING_BIAS = 12582912.0
ROUNDING_BIAS_BITS = 0x4B400000
# Probability masses are integers in units of 2**-MASS_BITS, so their sum does not depend on the order.
MASS_BITS = 40
MIN_EXPONENT = -60.0


def negative_log(x: torch.Tensor) -> torch.Tensor:
    """Return -log(x) in float32 for normal x above 0."""
    mantissa, exponent = _split(x)
    return _log(mantissa.sub_(1.0), exponent).neg_()


def negative_log1m(u: torch.Tensor) -> torch.Tensor:
    """Return -log(1 - u) in float32 for 0 < u < 1. Near 0 the result is as precise as u."""
    mantissa, exponent = _split(1.0 - u)
    return _log(torch.where(exponent == 0, -u, mantissa.sub_(1.0)), exponent).neg_()


def masses(x: torch.Tensor) -> torch.Tensor:
    """Return exp(x) as int64 in units of 2**-40, rounded down, for float32 x <= 0."""
    x = x.clamp(min=MIN_EXPONENT)
    rounded = (x * LOG2_E).add_(ROUNDING_BIAS)
    exponent = rounded.view(torch.int32) - ROUNDING_BIAS_BITS
    rounded.sub_(ROUNDING_BIAS)
    x.add_(rounded * -LOG2_HIGH).add_(rounded.mul_(-LOG2_LOW))
    power = _polynomial(EXP_TERMS, x).mul_(x * x).add_(x).add_(1.0)
    scaled = power.view(torch.int32) + ((exponent + MASS_BITS) << MANTISSA_BITS)
    return scaled.view(torch.float32).long()


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split into mantissas from sqrt(1/2) to sqrt(2) and exponents (int32)."""
    shifted = x.view(torch.int32) - SQRT_HALF_BITS
    exponent = shifted >> MANTISSA_BITS
    return shifted.bitwise_and_(MANTISSA_MASK).add_(SQRT_HALF_BITS).view(torch.float32), exponent


def _log(f: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return log(2**exponent * (1 + f))."""
    powers = exponent.float()
    square = f * f
    total = _polynomial(LOG_TERMS, f).mul_(f).mul_(square)
    total.add_(powers * LOG2_LOW).add_(square.mul_(-0.5)).add_(f)
    return total.add_(powers.mul_(LOG2_HIGH))


def _polynomial(terms: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    total = (x * terms[0]).add_(terms[1])
    for term in terms[2:]:
        total.mul_(x).add_(term)
    return total
