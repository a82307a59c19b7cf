"""Logarithms and exponentials whose bits are the same on every device, with any number of threads and in any piece.

They are made of float32 multiplications and additions, which IEEE 754 rounds in one way only, in a fixed order, and of
operations on integers. Torch's functions may differ in the last bit from one device to another, and on a CPU from
vectors to the elements left over. `specpool/engine/sampling/kernel.py` has the same formulas in Triton.

The reductions and the split of log(2) are those of the Cephes library; the polynomials are minimax fits.
"""

import torch

# Bits of the float32 next to sqrt(1/2): mantissas range from there to sqrt(2).
SQRT_HALF_BITS = 0x3F3504F3
MANTISSA_BITS, MANTISSA_MASK = 23, (1 << 23) - 1
# Their sum is log(2); the first has so few bits that its product with an exponent is exact.
LOG2_HIGH, LOG2_LOW = 0.693359375, -2.1219444170128554e-4
# log(1 + f) = f - f**2 / 2 + f**3 * polynomial(f), the highest power first.
LOG_TERMS = (
    0.08700393885374069, -0.14267481863498688, 0.14914777874946594, -0.1657758504152298, 0.19963063299655914,
    -0.2500133812427521, 0.3333390951156616,
)  # fmt: skip
# exp(r) = 1 + r + r**2 * polynomial(r).
EXP_TERMS = (0.008312055841088295, 0.04189445078372955, 0.16667133569717407, 0.4999920129776001)
LOG2_E = 1.4426950216293335
# Adding it rounds to an integer, which is then in the low bits of the sum.
ROUNDS = 12582912.0
ROUNDS_BITS = 0x4B400000
# Masses of probability are whole numbers in units of 2**-MASS_BITS, so that a sum is the same in any order.
MASS_BITS = 40
LEAST_EXPONENT = -60.0


def negative_log(x: torch.Tensor) -> torch.Tensor:
    """-log(x), float32, for normal x above 0."""
    mantissa, exponent = _split(x)
    return _log(mantissa.sub_(1.0), exponent).neg_()


def negative_log_of_rest(u: torch.Tensor) -> torch.Tensor:
    """-log(1 - u), float32, for u above 0 and below 1: close to 0 it is as precise as u is."""
    mantissa, exponent = _split(1.0 - u)
    return _log(torch.where(exponent == 0, -u, mantissa.sub_(1.0)), exponent).neg_()


def masses(x: torch.Tensor) -> torch.Tensor:
    """exp(x), int64, in units of 2**-40 and rounded down, for float32 x up to 0."""
    x = x.clamp(min=LEAST_EXPONENT)
    rounded = (x * LOG2_E).add_(ROUNDS)
    exponent = rounded.view(torch.int32) - ROUNDS_BITS
    rounded.sub_(ROUNDS)
    x.add_(rounded * -LOG2_HIGH).add_(rounded.mul_(-LOG2_LOW))
    power = _polynomial(EXP_TERMS, x).mul_(x * x).add_(x).add_(1.0)
    scaled = power.view(torch.int32) + ((exponent + MASS_BITS) << MANTISSA_BITS)
    return scaled.view(torch.float32).long()


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mantissas from sqrt(1/2) to sqrt(2), and exponents (int32)."""
    shifted = x.view(torch.int32) - SQRT_HALF_BITS
    exponent = shifted >> MANTISSA_BITS
    return shifted.bitwise_and_(MANTISSA_MASK).add_(SQRT_HALF_BITS).view(torch.float32), exponent


def _log(f: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """log(2**exponent * (1 + f))."""
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
