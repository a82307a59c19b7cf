"""The functions of `elementary` and `noise` for Triton kernels, with the same bits. Requires Triton."""

from specpool.engine.numerics import elementary
from specpool.engine.numerics.triton_compat import tl, triton

# Kernels can only read constants of Triton.
_LOG, _LOG_COUNT = tl.constexpr(elementary.LOG_TERMS), tl.constexpr(len(elementary.LOG_TERMS))
_EXP, _EXP_COUNT = tl.constexpr(elementary.EXP_TERMS), tl.constexpr(len(elementary.EXP_TERMS))
_SQRT_HALF_BITS = tl.constexpr(elementary.SQRT_HALF_BITS)
_MANTISSA_BITS, _MANTISSA_MASK = tl.constexpr(elementary.MANTISSA_BITS), tl.constexpr(elementary.MANTISSA_MASK)
_MASS_BITS, _MIN_EXPONENT = tl.constexpr(elementary.MASS_BITS), tl.constexpr(elementary.MIN_EXPONENT)
_LOG2_HIGH, _LOG2_LOW = tl.constexpr(elementary.LOG2_HIGH), tl.constexpr(elementary.LOG2_LOW)
_LOG2_E = tl.constexpr(elementary.LOG2_E)
_ROUNDING_BIAS = tl.constexpr(elementary.ROUNDING_BIAS)
_ROUNDING_BIAS_BITS = tl.constexpr(elementary.ROUNDING_BIAS_BITS)


@triton.jit
def gumbel(token_ids, first, second):
    """Return Gumbel noise, as `specpool.engine.numerics.noise.gumbel` does."""
    bits = _mix(_mix((token_ids ^ first).to(tl.uint32, bitcast=True)) + second.to(tl.uint32, bitcast=True))
    u = ((bits >> 16).to(tl.float32) * 65536.0 + ((bits & 0xFFFF).to(tl.float32) + 0.5)) * 2.0**-32
    u = tl.minimum(u, 1 - 2.0**-24)
    mantissa, exponent = _split(1.0 - u)
    mantissa, exponent = _split(_log(tl.where(exponent == 0, u * -1.0, mantissa - 1.0), exponent) * -1.0)
    return _log(mantissa - 1.0, exponent) * -1.0


@triton.jit
def noise_keys(low, high, position):
    """Return the keys of `specpool.engine.numerics.noise.noise_keys`. `low`, `high`: halves of the seed. All int32."""
    seed = _unsigned(high) << 32 | _unsigned(low)
    x = seed * 0x9E3779B97F4A7C15 + _unsigned(position) * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x ^= x >> 31
    return x.to(tl.uint32).to(tl.int32, bitcast=True), (x >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _unsigned(x):
    return x.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _split(x):
    shifted = x.to(tl.int32, bitcast=True) - _SQRT_HALF_BITS
    mantissa = (shifted & _MANTISSA_MASK) + _SQRT_HALF_BITS
    return mantissa.to(tl.float32, bitcast=True), shifted >> _MANTISSA_BITS


@triton.jit
def _log(f, exponent):
    powers, square = exponent.to(tl.float32), f * f
    total = _polynomial(f, _LOG, _LOG_COUNT) * f * square
    return total + powers * _LOG2_LOW + square * -0.5 + f + powers * _LOG2_HIGH


@triton.jit
def masses(x):
    """Return exp(x) in units of 2**-40, as `specpool.engine.numerics.elementary.masses` does."""
    x = tl.maximum(x, _MIN_EXPONENT)
    rounded = x * _LOG2_E + _ROUNDING_BIAS
    exponent = rounded.to(tl.int32, bitcast=True) - _ROUNDING_BIAS_BITS
    rounded -= _ROUNDING_BIAS
    x = x + rounded * -_LOG2_HIGH + rounded * -_LOG2_LOW
    power = _polynomial(x, _EXP, _EXP_COUNT) * (x * x) + x + 1.0
    scaled = power.to(tl.int32, bitcast=True) + ((exponent + _MASS_BITS) << _MANTISSA_BITS)
    return scaled.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def _polynomial(x, TERMS: tl.constexpr, COUNT: tl.constexpr):
    total = x * TERMS[0] + TERMS[1]
    for i in tl.static_range(2, COUNT):
        total = total * x + TERMS[i]
    return total


@triton.jit
def order_of_float(x):
    """Map floats to integers of the same order; -0.0 maps to 0."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -(1 << 31), 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of_order(x):
    bits = x.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
