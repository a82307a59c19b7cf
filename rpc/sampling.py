"""Sampling parameters of worker requests as plain data: both workers make the same thing of them."""

import math
from typing import Any

from specpool.v1 import common_pb2 as pb

from rpc.errors import InvalidArgumentError


def sampling_fields(sampling: pb.Sampling, field: str) -> dict[str, Any]:
    """The fields of `engine.sampling.SamplingParams`. InvalidArgumentError, under the name `field`, for what no sampler
    could work with."""
    numbers = {
        name: getattr(sampling, name)
        for name in ("temperature", "min_p", "frequency_penalty", "presence_penalty", "top_k", "min_tokens", "seed")
    }
    # Unset floats are 0, which for these two would be nonsense: it says that there is no such rule.
    numbers |= {name: getattr(sampling, name) or 1.0 for name in ("top_p", "repetition_penalty")}
    for name, value in [*numbers.items(), *(("logit_bias", bias) for bias in sampling.logit_bias.values())]:
        if not math.isfinite(value) or (
            value < 0 and not name.endswith(("presence_penalty", "frequency_penalty", "bias"))
        ):
            raise InvalidArgumentError(f"{field}.{name}", f"{value} is out of range")
    return {
        **numbers,
        "stop_token_ids": tuple(sampling.stop_token_ids),
        "logit_bias": tuple(sorted(sampling.logit_bias.items())),
    }
