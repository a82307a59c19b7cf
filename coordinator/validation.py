"""From a request message to a request that can be generated, or an error that names the field and the limit."""

import math
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from specpool.v1 import generation_pb2 as pb

from coordinator.sequence import GenerationRequest, Sampling
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer import ChatTemplateError, TargetTokenizer
from rpc.errors import InvalidArgumentError

MAX_REQUEST_ID_LENGTH = 128
MAX_STOP_TOKEN_IDS = 1024

MAX_LOGIT_BIASES = 1024
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 256

# Sampling parameters that are one number: the smallest and the largest that means something.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, math.inf),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "logprobs": (0, 20),
}
LEAST_TEMPERATURE = 0.01
LARGEST_BIAS = 100


@dataclass(frozen=True)
class Limits:
    """What a request must keep."""

    settings: CoordinatorSettings
    max_model_len: int
    vocab_size: int


def parse_request(request: pb.GenerateRequest, tokenizer: TargetTokenizer, limits: Limits) -> GenerationRequest:
    """Tokenizes and checks. InvalidArgumentError. May take a while for a long prompt."""
    params = request.sampling_params
    check_request_id(request.request_id)
    _check_ranges(params)
    prompt_ids = _prompt(request, tokenizer, limits)
    max_tokens = _max_tokens(params, limits, len(prompt_ids))
    return GenerationRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt_ids=tuple(prompt_ids),
        max_tokens=max_tokens,
        stop_token_ids=_stop_token_ids(params, tokenizer, limits),
        num_speculative_tokens=_num_speculative_tokens(request, limits),
        sampling=_sampling(params, max_tokens, limits),
        stop=_stop(params),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
    )


def check_request_id(request_id: str) -> None:
    """InvalidArgumentError if it is too long; an empty one is drawn later."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidArgumentError("request_id", f"has more than {MAX_REQUEST_ID_LENGTH} characters")


def _check_ranges(params: pb.SamplingParams) -> None:
    for name, (least, most) in _RANGES.items():
        value = getattr(params, name)
        if params.HasField(name) and not (math.isfinite(value) and least <= round(value, 6) <= most):
            limit = f"from {least:g} to {most:g}" if math.isfinite(most) else f"at least {least:g}"
            raise InvalidArgumentError(f"sampling_params.{name}", f"{value:g} is out of range: it must be {limit}")
    if params.temperature > 0 and round(params.temperature, 6) < LEAST_TEMPERATURE:
        refusal = f"{params.temperature:g} is out of range: it must be 0 or at least {LEAST_TEMPERATURE}"
        raise InvalidArgumentError("sampling_params.temperature", refusal)
    if params.HasField("top_p") and params.top_p == 0:
        raise InvalidArgumentError("sampling_params.top_p", "0 is out of range: it must be above 0")


def _sampling(params: pb.SamplingParams, max_tokens: int, limits: Limits) -> Sampling:
    if params.min_tokens > max_tokens:
        refusal = f"{params.min_tokens} is beyond max_tokens, {max_tokens}"
        raise InvalidArgumentError("sampling_params.min_tokens", refusal)
    return Sampling(
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        min_tokens=params.min_tokens,
        logit_bias=_logit_bias(params, limits),
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
    )


def _logit_bias(params: pb.SamplingParams, limits: Limits) -> tuple[tuple[int, float], ...]:
    field = "sampling_params.logit_bias"
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidArgumentError(field, f"has more than {MAX_LOGIT_BIASES} entries")
    for token, bias in params.logit_bias.items():
        if token >= limits.vocab_size:
            raise InvalidArgumentError(field, f"token id {token} is not below the vocabulary size {limits.vocab_size}")
        if not abs(bias) <= LARGEST_BIAS:
            refusal = f"{bias:g} for token {token} is out of range: it must be from -{LARGEST_BIAS} to {LARGEST_BIAS}"
            raise InvalidArgumentError(field, refusal)
    return tuple(sorted(params.logit_bias.items()))


def _stop(params: pb.SamplingParams) -> tuple[str, ...]:
    field = "sampling_params.stop"
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(field, f"has more than {MAX_STOP_STRINGS} entries")
    for index, stop in enumerate(params.stop):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            refusal = f"has {len(stop)} characters: it must have from 1 to {MAX_STOP_LENGTH}"
            raise InvalidArgumentError(f"{field}[{index}]", refusal)
    return tuple(params.stop)


def _prompt(request: pb.GenerateRequest, tokenizer: TargetTokenizer, limits: Limits) -> list[int]:
    encoders: dict[str, Callable[[], list[int]]] = {
        "text": lambda: tokenizer.encode_text(request.text),
        "tokenized": lambda: list(request.tokenized.input_ids),
        "chat": lambda: _chat(request.chat, tokenizer),
    }
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgumentError("input", f"one of {', '.join(encoders)} must be set")
    field = "tokenized.input_ids" if kind == "tokenized" else "chat.messages" if kind == "chat" else "text"
    prompt_ids = encoders[kind]()
    if not prompt_ids:
        raise InvalidArgumentError(field, "the prompt is empty")
    if len(prompt_ids) >= limits.max_model_len:
        raise InvalidArgumentError(
            field, f"the prompt has {len(prompt_ids)} tokens, more than {limits.max_model_len - 1}"
        )
    if (largest := max(prompt_ids)) >= limits.vocab_size:
        raise InvalidArgumentError(field, f"token id {largest} is not below the vocabulary size {limits.vocab_size}")
    return prompt_ids


def _chat(chat: pb.ChatInput, tokenizer: TargetTokenizer) -> list[int]:
    if not chat.messages:
        raise InvalidArgumentError("chat.messages", "must not be empty")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidArgumentError(f"chat.messages[{index}].role", "must not be empty")
    try:
        return tokenizer.encode_chat([(message.role, message.content) for message in chat.messages])
    except ChatTemplateError as error:
        raise InvalidArgumentError("chat.messages", str(error)) from None


def _max_tokens(params: pb.SamplingParams, limits: Limits, prompt_tokens: int) -> int:
    room = limits.max_model_len - prompt_tokens
    if not params.HasField("max_tokens"):
        return min(limits.settings.default_max_tokens, room)
    if params.max_tokens < 1:
        raise InvalidArgumentError("sampling_params.max_tokens", "must be at least 1")
    if params.max_tokens > room:
        raise InvalidArgumentError(
            "sampling_params.max_tokens",
            f"{params.max_tokens} is beyond {room}, what the prompt leaves of {limits.max_model_len} positions",
        )
    return params.max_tokens


def _stop_token_ids(params: pb.SamplingParams, tokenizer: TargetTokenizer, limits: Limits) -> frozenset[int]:
    field = "sampling_params.stop_token_ids"
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgumentError(field, f"has more than {MAX_STOP_TOKEN_IDS} entries")
    if params.stop_token_ids and (largest := max(params.stop_token_ids)) >= limits.vocab_size:
        raise InvalidArgumentError(field, f"token id {largest} is not below the vocabulary size {limits.vocab_size}")
    eos = () if params.ignore_eos else tokenizer.eos_token_ids
    return frozenset([*params.stop_token_ids, *eos])


def _num_speculative_tokens(request: pb.GenerateRequest, limits: Limits) -> int:
    if not request.speculative.HasField("num_speculative_tokens"):
        return limits.settings.num_speculative_tokens
    wanted = request.speculative.num_speculative_tokens
    if wanted > (most := limits.settings.max_num_speculative_tokens):
        raise InvalidArgumentError("speculative.num_speculative_tokens", f"{wanted} is beyond the limit of {most}")
    return wanted
