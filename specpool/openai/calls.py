"""Convert request bodies to gRPC requests."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specpool.client.chats import make_chat
from specpool.openai.bodies import ChatBody, CompletionBody, GenerationBody, Message
from specpool.openai.errors import invalid
from specpool.openai.output import OutputPlan, plan_output
from specpool.v1 import generation_pb2 as pb

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default. The gRPC API defaults to 0."""
MAX_KEY_CHARACTERS = 1024
"""Leading characters or tokens of a prompt that select its coordinator."""

_TOKEN_ID = re.compile("[0-9]{1,10}")
# Fields with the same name and meaning in `SamplingParams`.
SAME = (
    "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "max_tokens",
    "min_tokens", "stop", "stop_token_ids", "n", "ignore_eos", "json_whitespace", "max_thinking_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The gRPC requests for a body, and how to read their responses."""

    requests: list[pb.GenerateRequest]
    """One per prompt."""
    plan: OutputPlan | None
    """How to read the answers. None: as plain text."""
    names: Mapping[str, str]
    """Names of the body's fields by their names in the gRPC API, where they differ."""
    samples: int
    """Number of samples per prompt."""
    eos_token_ids: frozenset[int]
    """Stop tokens that answers do not report."""
    with_reasoning: bool = True
    """Whether answers include the model's reasoning."""


def chat_work(body: ChatBody, info: pb.GetModelInfoResponse, request_id: str) -> Work:
    """Convert the body of a chat. Raises ApiError."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    with_tools = body.tool_choice != "none"  # otherwise hide them from the model
    try:
        plan = plan_output(
            info,
            tools=body.tools,
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )
        messages = [_message(message) for message in body.messages]
        chat = make_chat(messages, (body.tools if with_tools else None) or None, _template_options(body, info))
    except (TypeError, ValueError) as error:
        param, _, reason = str(error).partition(": ")
        raise invalid(param, reason) from None
    params, names = _params(body, info, plan)
    if params.WhichOneof("constraint") and not params.constraint_after_reasoning:
        plan = replace(plan, reasoning=pb.ReasoningTags())  # the whole text is the answer
    if body.max_completion_tokens is not None:
        params.max_tokens, names["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
    if body.logprobs:
        params.logprobs, names["logprobs"] = body.top_logprobs or 0, "top_logprobs"
    requests, eos_token_ids = [_request(body, params, request_id, chat=chat)], frozenset(info.eos_token_ids)
    return Work(requests, plan, names, params.n or 1, eos_token_ids, body.include_reasoning)


def completion_work(body: CompletionBody, info: pb.GetModelInfoResponse, request_id: str) -> Work:
    """Convert the body of a completion. Raises ApiError."""
    params, names = _params(body, info, None)
    if body.logprobs is not None:
        params.logprobs = body.logprobs
    requests = [
        _request(body, params, f"{request_id}-{number}" if number else request_id, **prompt)
        for number, prompt in enumerate(_prompts(body.prompt))
    ]
    return Work(requests, None, names, params.n or 1, frozenset(info.eos_token_ids))


def chat_prefix(body: ChatBody) -> str:
    """Return the messages up to the first user message, which all turns of a conversation share."""
    first = next((number for number, each in enumerate(body.messages, 1) if each.role == "user"), len(body.messages))
    return "\n".join(message.text or "" for message in body.messages[:first])[:MAX_KEY_CHARACTERS]


def completion_prefix(body: CompletionBody) -> str:
    """Return the beginning of the first prompt."""
    first = _prompts(body.prompt)[0]
    if "text" in first:
        return str(first["text"][:MAX_KEY_CHARACTERS])
    return ",".join(map(str, first["tokenized"].input_ids[:MAX_KEY_CHARACTERS]))


def _prompts(prompt: Any) -> list[dict[str, Any]]:
    """Return the input field of each request."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    return [
        {"text": each} if isinstance(each, str) else {"tokenized": pb.TokenizedInput(input_ids=each)} for each in prompt
    ]


def _request(body: GenerationBody, params: pb.SamplingParams, request_id: str, **prompt: Any) -> pb.GenerateRequest:
    prediction = pb.Prediction(text=body.prediction.text) if body.prediction is not None else None
    return pb.GenerateRequest(
        request_id=request_id,
        sampling_params=params,
        speculative=pb.SpeculativeParams(prediction=prediction),
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        **prompt,
    )


def _params(
    body: GenerationBody, info: pb.GetModelInfoResponse, plan: OutputPlan | None
) -> tuple[pb.SamplingParams, dict[str, str]]:
    """Return the sampling parameters, and `Work.names`. Raises ApiError."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream: true")
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    constraint, names = _constraint(body, plan)
    if constraint and plan is not None and info.HasField("reasoning"):
        constraint.setdefault("constraint_after_reasoning", True)
    if constraint and body.ignore_eos:
        raise invalid("ignore_eos", f"cannot be combined with {next(iter(names.values()))}")
    temperature = DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    params = pb.SamplingParams(temperature=temperature, **given, **constraint)
    if body.constraint_after_reasoning is not None:
        params.constraint_after_reasoning = body.constraint_after_reasoning
    if body.seed is not None:
        params.seed = body.seed % 2**64
    if not body.skip_special_tokens or (plan is not None and not plan.skip_special_tokens):
        params.skip_special_tokens = False
    for token, bias in (body.logit_bias or {}).items():
        if not _TOKEN_ID.fullmatch(token) or int(token) >= 2**32:
            raise invalid("logit_bias", f"{token[:20]!r} is not a token id")
        params.logit_bias[int(token)] = bias
    return params, names


def _constraint(body: GenerationBody, plan: OutputPlan | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the constraint as fields of `SamplingParams`, and `Work.names`. Raises ApiError."""
    found: list[tuple[str, dict[str, Any]]] = []
    if body.response_format is not None and body.response_format.type != "text":
        schema = body.response_format.json_schema
        if schema is not None:
            found.append(("response_format.json_schema.schema", {"json_schema": json.dumps(schema.schema_)}))
        else:
            found.append(("response_format", {"json_object": True}))
    if body.structured_outputs is not None:
        (name, value), *_ = body.structured_outputs.model_dump(by_alias=True, exclude_none=True).items()
        found.append((f"structured_outputs.{name}", _structured(name, value)))
    if plan is not None and plan.constraint and (not found or plan.choice.mode == "required"):
        # A required call is the whole answer. Otherwise, the format of the content wins, as in vLLM.
        return dict(plan.constraint), dict.fromkeys(plan.constraint, "tool_choice")
    if len(found) > 1:
        raise invalid(found[0][0].partition(".")[0], f"cannot be combined with {found[1][0].partition('.')[0]}")
    if not found:
        return {}, {}
    [(name, fields)] = found
    return fields, dict.fromkeys(fields, name)


def _structured(name: str, value: Any) -> dict[str, Any]:
    if name == "json":
        return {"json_schema": value if isinstance(value, str) else json.dumps(value)}
    if name == "structural_tag" and not isinstance(value, str):
        value = json.dumps(value)
    return {name: pb.ChoiceConstraint(choices=value) if name == "choice" else value}


def _template_options(body: ChatBody, info: pb.GetModelInfoResponse) -> dict[str, Any] | None:
    """Return the options of the chat template. As in vLLM, it ignores `reasoning_effort` if it has no such option."""
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if "reasoning_effort" in info.chat_template_options:
            options.setdefault("reasoning_effort", body.reasoning_effort)
        elif "enable_thinking" in info.chat_template_options:
            options.setdefault("enable_thinking", body.reasoning_effort != "none")
    return options or None


def _message(message: Message) -> dict[str, Any]:
    """Convert a message for `make_chat`."""
    role = "system" if message.role == "developer" else message.role  # few templates know the developer role
    calls = [call.model_dump(exclude={"index"}) for call in message.tool_calls or ()]
    return {
        "role": role,
        "content": message.text,
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
