"""Request validation. Errors name the field and its limit."""

import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coordinator.config.settings import CoordinatorSettings
from coordinator.prompts.chat_reader import check_size
from coordinator.prompts.constraint_reader import ConstraintReader, constraint_field, read_constraint
from coordinator.prompts.prediction_reader import check_prediction, read_prediction
from coordinator.prompts.prompt_reader import PromptReader
from coordinator.prompts.reasoning_reader import check_reasoning, read_reasoning
from coordinator.prompts.tokenizer_pool import Constraint, TokenizerPool
from coordinator.scheduling.sequence import GenerationRequest
from specpool.drafting.plans import DraftMethod
from specpool.protocol.errors import InvalidArgumentError, UnimplementedError
from specpool.protocol.sampling import RANGES, SamplingParams, in_range
from specpool.rpc.observability import logs
from specpool.v1 import generation_pb2 as pb

MAX_REQUEST_ID_LENGTH = 128
MAX_SALT_LENGTH = 128
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 256
MAX_LOGPROBS = 20
MAX_ANSWER_LOGPROBS = 2**22
"""Log-probabilities that the coordinator keeps for a request, of all its samples: up to 32 MiB."""
MAX_SAMPLES = 64
MIN_TEMPERATURE = 0.01


@dataclass(frozen=True)
class Limits:
    settings: CoordinatorSettings
    prompts: PromptReader
    max_num_seqs: int
    constraints: ConstraintReader
    grammar_refusal: str | None = None
    """Why the target worker does not follow grammars; None if it does."""


async def read_request(
    message: pb.GenerateRequest,
    client: str,
    limits: Limits,
    pool: TokenizerPool,
    check_queue: Callable[[GenerationRequest], None],
) -> GenerationRequest:
    """Validate a client's request. `check_queue` runs before expensive work, and may raise.

    Raises InvalidArgumentError, QueueFullError, UnavailableError, UnimplementedError.
    """
    request = _parse(message, client, limits)
    constraint = _constraint(message, limits)
    logs.bind_request(request.request_id)
    limits.prompts.check(message)
    check_prediction(message.speculative, limits.prompts)
    before = partial(check_queue, request)
    before()
    prompt_ids = await limits.prompts.read(message, client, pool, before)
    sampling = request.sampling
    if constraint is not None:
        grammar = await limits.constraints.read(constraint, client, before)
        sampling = replace(sampling, grammar=grammar)
        request = replace(request, constraint=constraint_field(constraint.kind))
    params, remaining = message.sampling_params, limits.prompts.max_model_len - len(prompt_ids)
    if params.HasField("max_tokens"):
        _check_max_tokens(params.max_tokens, remaining, limits)
    max_tokens = min(request.max_tokens, remaining)
    _check_min_tokens(params, max_tokens)
    _check_logprobs(request, max_tokens)
    tokenizer = limits.prompts.tokenizer
    starts_in_reasoning = tokenizer.starts_in_reasoning(prompt_ids, message.HasField("chat"))
    reasoning = read_reasoning(params, tokenizer.reasoning, starts_in_reasoning, max_tokens)
    prediction: tuple[int, ...] = ()
    if message.speculative.HasField("prediction") and request.num_speculative_tokens:
        prediction = await read_prediction(message.speculative.prediction, client, limits.prompts, pool, before)
    return replace(
        request,
        prompt_ids=prompt_ids,
        prediction=prediction,
        max_tokens=max_tokens,
        sampling=replace(sampling, reasoning=reasoning),
        starts_in_reasoning=starts_in_reasoning,
    )


def check_request_id(request_id: str) -> None:
    """Raise InvalidArgumentError for an id that is too long."""
    check_size("request_id", request_id, MAX_REQUEST_ID_LENGTH, "characters")


def _parse(message: pb.GenerateRequest, client: str, limits: Limits) -> GenerationRequest:
    """Parse everything except the prompt."""
    params = message.sampling_params
    check_request_id(message.request_id)
    sampling = _sampling(params)
    max_tokens = _max_tokens(params, limits)
    _check_min_tokens(params, max_tokens)
    check_reasoning(params, limits.prompts.tokenizer.reasoning)
    check_size("cache_salt", message.cache_salt, MAX_SALT_LENGTH, "characters")
    num_speculative_tokens, adaptive = _num_speculative_tokens(message, limits)
    return GenerationRequest(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_ids=(),
        max_tokens=max_tokens,
        stop_token_ids=_stop_token_ids(params, limits),
        num_speculative_tokens=num_speculative_tokens,
        adaptive=adaptive,
        method=_draft_method(message, limits),
        sampling=replace(sampling, logit_bias=_logit_bias(params, limits)),
        stop=_stop(params),
        skip_special_tokens=params.skip_special_tokens or not params.HasField("skip_special_tokens"),
        logprobs=int(_number(params, "logprobs", (0, MAX_LOGPROBS))) if params.HasField("logprobs") else None,
        n=_number_of_samples(params, sampling, limits),
        priority=message.priority,
        cache_salt=message.cache_salt,
        client=client,
    )


def _constraint(message: pb.GenerateRequest, limits: Limits) -> Constraint | None:
    constraint = read_constraint(message.sampling_params)
    if constraint is not None:
        limits.constraints.check(constraint)
        if limits.grammar_refusal is not None:
            raise UnimplementedError(f"{constraint_field(constraint.kind)}: {limits.grammar_refusal}")
    return constraint


def _sampling(params: pb.SamplingParams) -> SamplingParams:
    names = [name for name in RANGES if name != "logit_bias" and params.HasField(name)]
    numbers = {name: _number(params, name, RANGES[name]) for name in names}
    if numbers.get("temperature", 0) > 0 and params.temperature < MIN_TEMPERATURE - 1e-6:
        refusal = f"{params.temperature:g} is out of range: it must be 0 or at least {MIN_TEMPERATURE}"
        raise InvalidArgumentError("sampling_params.temperature", refusal, limit=MIN_TEMPERATURE)
    if numbers.get("top_p") == 0:
        raise InvalidArgumentError("sampling_params.top_p", "0 is out of range: it must be above 0")
    if "top_k" in numbers:
        numbers["top_k"] = max(0, numbers["top_k"])
    seed = params.seed if params.HasField("seed") else secrets.randbits(64)
    return SamplingParams(**numbers, min_tokens=params.min_tokens, seed=seed)


def _number(params: pb.SamplingParams, name: str, limits: tuple[float, float]) -> Any:
    return in_range(f"sampling_params.{name}", getattr(params, name), limits)


def _number_of_samples(params: pb.SamplingParams, sampling: SamplingParams, limits: Limits) -> int:
    if not params.HasField("n"):
        return 1
    # More samples than fit in window and queue would never be admitted.
    number = int(_number(params, "n", (1, min(MAX_SAMPLES, limits.max_num_seqs + limits.settings.queue_size))))
    if number > 1 and sampling.temperature == 0:
        refusal = f"{number} samples need a temperature above 0: they would be equal"
        raise InvalidArgumentError("sampling_params.n", refusal)
    return number


def _check_token_id(field: str, token: int, limits: Limits) -> None:
    if token >= limits.prompts.vocab_size:
        refusal = f"token id {token} is not below the vocabulary size {limits.prompts.vocab_size}"
        raise InvalidArgumentError(field, refusal, limit=limits.prompts.vocab_size - 1)


def _logit_bias(params: pb.SamplingParams, limits: Limits) -> tuple[tuple[int, float], ...]:
    field = "sampling_params.logit_bias"
    check_size(field, params.logit_bias, MAX_LOGIT_BIASES)
    for token in params.logit_bias:
        _check_token_id(field, token, limits)
    biases = sorted(params.logit_bias.items())
    return tuple((token, in_range(field, bias, RANGES["logit_bias"])) for token, bias in biases)


def _stop(params: pb.SamplingParams) -> tuple[str, ...]:
    field = "sampling_params.stop"
    check_size(field, params.stop, MAX_STOP_STRINGS)
    for index, stop in enumerate(params.stop):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            refusal = f"has {len(stop)} characters: it must have from 1 to {MAX_STOP_LENGTH}"
            raise InvalidArgumentError(f"{field}[{index}]", refusal, limit=MAX_STOP_LENGTH if stop else 1)
    return tuple(params.stop)


def _stop_token_ids(params: pb.SamplingParams, limits: Limits) -> frozenset[int]:
    field = "sampling_params.stop_token_ids"
    check_size(field, params.stop_token_ids, MAX_STOP_TOKEN_IDS)
    if params.stop_token_ids:
        _check_token_id(field, max(params.stop_token_ids), limits)
    eos = () if params.ignore_eos else limits.prompts.tokenizer.files.eos_token_ids
    return frozenset([*params.stop_token_ids, *eos])


def _max_tokens(params: pb.SamplingParams, limits: Limits) -> int:
    remaining = limits.prompts.max_model_len - 1  # every prompt takes a position
    if not params.HasField("max_tokens"):
        return min(limits.settings.default_max_tokens, remaining)
    if params.max_tokens < 1:
        raise InvalidArgumentError("sampling_params.max_tokens", "must be at least 1", limit=1)
    _check_max_tokens(params.max_tokens, remaining, limits)
    return params.max_tokens


def _check_max_tokens(max_tokens: int, remaining: int, limits: Limits) -> None:
    if max_tokens > remaining:
        limit = limits.prompts.max_model_len
        refusal = f"{max_tokens} exceeds the {remaining} positions left after the prompt (limit {limit})"
        raise InvalidArgumentError("sampling_params.max_tokens", refusal, limit=remaining)


def _check_min_tokens(params: pb.SamplingParams, max_tokens: int) -> None:
    if params.min_tokens > max_tokens:
        refusal = f"{params.min_tokens} exceeds max_tokens, {max_tokens}"
        raise InvalidArgumentError("sampling_params.min_tokens", refusal, limit=max_tokens)


def _check_logprobs(request: GenerationRequest, max_tokens: int) -> None:
    if request.logprobs is None:
        return
    kept = request.n * max_tokens * (1 + request.logprobs)
    if kept > MAX_ANSWER_LOGPROBS:
        refusal = f"n * max_tokens * (logprobs + 1) is {kept}, more than {MAX_ANSWER_LOGPROBS}"
        raise InvalidArgumentError("sampling_params.logprobs", refusal, limit=MAX_ANSWER_LOGPROBS)


def _num_speculative_tokens(message: pb.GenerateRequest, limits: Limits) -> tuple[int, bool]:
    """Draft tokens of a round, and whether the number is a maximum for adaptive draft lengths."""
    maximum, default = limits.settings.max_num_speculative_tokens, limits.settings.num_speculative_tokens
    if not message.speculative.HasField("num_speculative_tokens"):
        return (maximum, True) if default is None else (default, False)
    number = message.speculative.num_speculative_tokens
    if number > maximum:
        refusal = f"{number} exceeds the limit of {maximum}"
        raise InvalidArgumentError("speculative.num_speculative_tokens", refusal, limit=maximum)
    return number, False


def _draft_method(message: pb.GenerateRequest, limits: Limits) -> DraftMethod:
    method = message.speculative.method
    if method == pb.DRAFT_METHOD_UNSPECIFIED:
        return limits.settings.draft_method
    if method not in pb.DraftMethod.values():
        raise InvalidArgumentError("speculative.method", f"unknown method {method}")
    return DraftMethod(pb.DraftMethod.Name(method).removeprefix("DRAFT_METHOD_").lower())
