"""From a request message to a request that can be generated, or an error that names the field and the limit."""

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from specpool.v1 import generation_pb2 as pb

from coordinator.sequence import GenerationRequest
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer import ChatTemplateError, TargetTokenizer
from rpc.errors import InvalidArgumentError, NotHonouredError

MAX_REQUEST_ID_LENGTH = 128
MAX_STOP_TOKEN_IDS = 1024

# Sampling parameters that are not honoured yet, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "min_tokens": (0,),
    "logprobs": (),
}


@dataclass(frozen=True)
class Limits:
    """What a request must keep."""

    settings: CoordinatorSettings
    max_model_len: int
    vocab_size: int


def parse_request(request: pb.GenerateRequest, tokenizer: TargetTokenizer, limits: Limits) -> GenerationRequest:
    """Tokenizes and checks. InvalidArgumentError, NotHonouredError. May take a while for a long prompt."""
    params = request.sampling_params
    _refuse_not_honoured(params)
    check_request_id(request.request_id)
    prompt_ids = _prompt(request, tokenizer, limits)
    return GenerationRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt_ids=tuple(prompt_ids),
        max_tokens=_max_tokens(params, limits, len(prompt_ids)),
        stop_token_ids=_stop_token_ids(params, tokenizer, limits),
        num_speculative_tokens=_num_speculative_tokens(request, limits),
        seed=params.seed if params.HasField("seed") else None,
    )


def check_request_id(request_id: str) -> None:
    """InvalidArgumentError if it is too long; an empty one is drawn later."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidArgumentError("request_id", f"has more than {MAX_REQUEST_ID_LENGTH} characters")


def _refuse_not_honoured(params: pb.SamplingParams) -> None:
    for name, neutral in _NEUTRAL.items():
        if not params.HasField(name):
            continue
        field, value = f"sampling_params.{name}", getattr(params, name)
        if not math.isfinite(value):
            raise InvalidArgumentError(field, f"{value} is not a number")
        if value not in neutral:
            raise NotHonouredError(field, f"{value:g} is not supported yet; leave it unset")
    for name in ("stop", "logit_bias"):
        if getattr(params, name):
            raise NotHonouredError(f"sampling_params.{name}", "is not supported yet; leave it empty")


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
