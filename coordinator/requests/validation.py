"""Validation: from a request message to a request that can be generated, or an error that names field and limit.

Prompts are read in `coordinator.prompts`.
"""

import secrets
import uuid
from dataclasses import dataclass, replace
from typing import Any

from coordinator.config.settings import CoordinatorSettings
from coordinator.scheduling.sequence import DraftMethod, GenerationRequest
from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.sampling import RANGES, SamplingParams, in_range
from specpool.v1 import generation_pb2 as pb

MAX_REQUEST_ID_LENGTH = 128
MAX_SALT_LENGTH = 128
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 256
MAX_LOGPROBS = 20
MAX_SAMPLES = 64
LEAST_TEMPERATURE = 0.01


@dataclass(frozen=True)
class Limits:
    """The limits that a request must keep."""

    settings: CoordinatorSettings
    max_model_len: int
    vocab_size: int
    max_num_seqs: int


def parse_request(request: pb.GenerateRequest, eos_token_ids: tuple[int, ...], limits: Limits) -> GenerationRequest:
    """Checks all but the prompt, which the result lacks until `with_prompt`. InvalidArgumentError."""
    params = request.sampling_params
    check_request_id(request.request_id)
    sampling = _sampling(params)
    max_tokens = _max_tokens(params, limits)
    _check_min_tokens(params, max_tokens)
    return GenerationRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt_ids=(),
        max_tokens=max_tokens,
        stop_token_ids=_stop_token_ids(params, eos_token_ids, limits),
        num_speculative_tokens=_num_speculative_tokens(request, limits),
        adaptive=_is_adaptive(request, limits),
        method=_draft_method(request, limits),
        sampling=replace(sampling, logit_bias=_logit_bias(params, limits)),
        stop=_stop(params),
        logprobs=_logprobs(params),
        n=_number_of_samples(params, sampling, limits),
        priority=request.priority,
        cache_salt=_cache_salt(request),
    )


def with_prompt(
    parsed: GenerationRequest, prompt_ids: tuple[int, ...], params: pb.SamplingParams, limits: Limits
) -> GenerationRequest:
    """The request with its prompt. InvalidArgumentError if the prompt leaves fewer positions than the request asks
    for."""
    remaining = limits.max_model_len - len(prompt_ids)
    if params.HasField("max_tokens") and params.max_tokens > remaining:
        raise _too_many_tokens(params.max_tokens, remaining, limits)
    max_tokens = min(parsed.max_tokens, remaining)
    _check_min_tokens(params, max_tokens)
    return replace(parsed, prompt_ids=prompt_ids, max_tokens=max_tokens)


def check_request_id(request_id: str) -> None:
    """Raises InvalidArgumentError for an id that is too long; an empty one is replaced later."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidArgumentError("request_id", f"has more than {MAX_REQUEST_ID_LENGTH} characters")


def _sampling(params: pb.SamplingParams) -> SamplingParams:
    numbers = {name: _number(params, name) for name in RANGES if name != "logit_bias" and params.HasField(name)}
    if numbers.get("temperature", 0) > 0 and params.temperature < LEAST_TEMPERATURE - 1e-6:
        refusal = f"{params.temperature:g} is out of range: it must be 0 or at least {LEAST_TEMPERATURE}"
        raise InvalidArgumentError("sampling_params.temperature", refusal)
    if numbers.get("top_p") == 0:
        raise InvalidArgumentError("sampling_params.top_p", "0 is out of range: it must be above 0")
    if "top_k" in numbers:
        numbers["top_k"] = max(0, numbers["top_k"])
    seed = params.seed if params.HasField("seed") else secrets.randbits(64)
    return SamplingParams(**numbers, min_tokens=params.min_tokens, seed=seed)


def _number(params: pb.SamplingParams, name: str) -> Any:
    return in_range(f"sampling_params.{name}", getattr(params, name), RANGES[name])


def _logprobs(params: pb.SamplingParams) -> int | None:
    if not params.HasField("logprobs"):
        return None
    return int(in_range("sampling_params.logprobs", params.logprobs, (0, MAX_LOGPROBS)))


def _number_of_samples(params: pb.SamplingParams, sampling: SamplingParams, limits: Limits) -> int:
    if not params.HasField("n"):
        return 1
    # More samples than fit in window and queue together would never be admitted.
    most = min(MAX_SAMPLES, limits.max_num_seqs + limits.settings.queue_size)
    number = int(in_range("sampling_params.n", params.n, (1, most)))
    if number > 1 and sampling.temperature == 0:
        raise InvalidArgumentError(
            "sampling_params.n", f"{number} samples need a temperature above 0: they would be equal"
        )
    return number


def _logit_bias(params: pb.SamplingParams, limits: Limits) -> tuple[tuple[int, float], ...]:
    field = "sampling_params.logit_bias"
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidArgumentError(field, f"has more than {MAX_LOGIT_BIASES} entries")
    for token in params.logit_bias:
        if token >= limits.vocab_size:
            raise InvalidArgumentError(field, f"token id {token} is not below the vocabulary size {limits.vocab_size}")
    biases = sorted(params.logit_bias.items())
    return tuple((token, in_range(field, bias, RANGES["logit_bias"])) for token, bias in biases)


def _stop(params: pb.SamplingParams) -> tuple[str, ...]:
    field = "sampling_params.stop"
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(field, f"has more than {MAX_STOP_STRINGS} entries")
    for index, stop in enumerate(params.stop):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            refusal = f"has {len(stop)} characters: it must have from 1 to {MAX_STOP_LENGTH}"
            raise InvalidArgumentError(f"{field}[{index}]", refusal)
    return tuple(params.stop)


def _max_tokens(params: pb.SamplingParams, limits: Limits) -> int:
    remaining = limits.max_model_len - 1  # every prompt takes a position
    if not params.HasField("max_tokens"):
        return min(limits.settings.default_max_tokens, remaining)
    if params.max_tokens < 1:
        raise InvalidArgumentError("sampling_params.max_tokens", "must be at least 1")
    if params.max_tokens > remaining:
        raise _too_many_tokens(params.max_tokens, remaining, limits)
    return params.max_tokens


def _too_many_tokens(max_tokens: int, remaining: int, limits: Limits) -> InvalidArgumentError:
    refusal = f"{max_tokens} is beyond {remaining}, what the prompt leaves of {limits.max_model_len} positions"
    return InvalidArgumentError("sampling_params.max_tokens", refusal)


def _check_min_tokens(params: pb.SamplingParams, max_tokens: int) -> None:
    if params.min_tokens > max_tokens:
        refusal = f"{params.min_tokens} is beyond max_tokens, {max_tokens}"
        raise InvalidArgumentError("sampling_params.min_tokens", refusal)


def _cache_salt(request: pb.GenerateRequest) -> str:
    if len(request.cache_salt) > MAX_SALT_LENGTH:
        raise InvalidArgumentError("cache_salt", f"has more than {MAX_SALT_LENGTH} characters")
    return request.cache_salt


def _stop_token_ids(params: pb.SamplingParams, eos_token_ids: tuple[int, ...], limits: Limits) -> frozenset[int]:
    field = "sampling_params.stop_token_ids"
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgumentError(field, f"has more than {MAX_STOP_TOKEN_IDS} entries")
    if params.stop_token_ids and (largest := max(params.stop_token_ids)) >= limits.vocab_size:
        raise InvalidArgumentError(field, f"token id {largest} is not below the vocabulary size {limits.vocab_size}")
    eos = () if params.ignore_eos else eos_token_ids
    return frozenset([*params.stop_token_ids, *eos])


def _num_speculative_tokens(request: pb.GenerateRequest, limits: Limits) -> int:
    most = limits.settings.max_num_speculative_tokens
    if not request.speculative.HasField("num_speculative_tokens"):
        preset = limits.settings.num_speculative_tokens
        return most if preset is None else preset
    wanted = request.speculative.num_speculative_tokens
    if wanted > most:
        raise InvalidArgumentError("speculative.num_speculative_tokens", f"{wanted} is beyond the limit of {most}")
    return wanted


def _is_adaptive(request: pb.GenerateRequest, limits: Limits) -> bool:
    preset = limits.settings.num_speculative_tokens
    return preset is None and not request.speculative.HasField("num_speculative_tokens")


def _draft_method(request: pb.GenerateRequest, limits: Limits) -> DraftMethod:
    method = request.speculative.method
    if method == pb.DRAFT_METHOD_UNSPECIFIED:
        return limits.settings.draft_method
    if method not in pb.DraftMethod.values():
        raise InvalidArgumentError("speculative.method", f"{method} is none of the methods")
    return DraftMethod(pb.DraftMethod.Name(method).removeprefix("DRAFT_METHOD_").lower())
