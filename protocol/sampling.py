"""Sampling parameters between message and plain data: the same ranges and the same reading in every process."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from rpc.errors import InvalidArgumentError
from specpool.v1 import common_pb2 as pb

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, math.inf),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "logit_bias": (-100, 100),
}
"""The smallest and the largest value that means something."""

# As far as float32, which the wire carries, tells numbers of this size apart.
_DIGITS = 6

Params = TypeVar("Params")


def in_range(field: str, value: float, limits: tuple[float, float]) -> float:
    """The value, on its limit if only rounding took it beyond. InvalidArgumentError."""
    least, most = limits
    if not (math.isfinite(value) and least <= round(value, _DIGITS) <= most):
        limit = f"from {least:g} to {most:g}" if math.isfinite(most) else f"at least {least:g}"
        raise InvalidArgumentError(field, f"{value:g} is out of range: it must be {limit}")
    return min(max(value, least), most)


def read_sampling(item: Any, index: int, make: Callable[..., Params]) -> Params | None:
    """The sampling parameters of an item of a worker request; None if it has none. InvalidArgumentError.

    `make` is `engine.sampling.SamplingParams`, which this package must not import.
    """
    if not item.HasField("sampling"):
        return None
    sampling: pb.Sampling = item.sampling
    field = f"items[{index}].sampling"
    numbers = {name: getattr(sampling, name) for name in RANGES if name != "logit_bias"}
    # Unset floats are 0, which for these two would be nonsense: it says that there is no such rule.
    numbers |= {name: numbers[name] or 1.0 for name in ("top_p", "repetition_penalty")}
    biases = sorted(sampling.logit_bias.items())
    return make(
        **{name: in_range(f"{field}.{name}", value, RANGES[name]) for name, value in numbers.items()},
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        logit_bias=tuple(
            (token, in_range(f"{field}.logit_bias", bias, RANGES["logit_bias"])) for token, bias in biases
        ),
        seed=sampling.seed,
        prompt_length=sampling.prompt_length,
    )


class Logprobs(Protocol):
    """Log-probabilities at one position, as the engine and the coordinator have them."""

    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


def logprobs_message(found: Logprobs) -> pb.TokenLogprobs:
    """The same as a message."""
    return pb.TokenLogprobs(
        logprob=found.logprob,
        top_token_ids=[token for token, _ in found.top],
        top_logprobs=[logprob for _, logprob in found.top],
    )
