"""Builds request messages from Python arguments."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, cast, get_args

from google.protobuf.message import Message

from specpool.client.chats import Chat, make_chat
from specpool.client.constraints import JsonSchema, read_constraint
from specpool.v1 import generation_pb2 as pb

CHAT_OPTIONS = ("tools", "chat_template_kwargs")
Prompt = str | Chat | Sequence[int]
"""A text, a conversation, or token ids."""
Prediction = str | Sequence[int]
"""A text or token ids."""

DraftMethodName = Literal["model", "ngram", "suffix", "prediction", "best"]
"""See `DraftMethod` in the proto files."""


class GenerateOptions(TypedDict, total=False):
    """Fields of `GenerateRequest`, `SamplingParams`, `SpeculativeParams` and `ChatInput`; see their comments.

    None selects the server's default.
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    seed: int | None
    logprobs: int | None
    n: int | None
    json_schema: JsonSchema | None
    regex: str | None
    grammar: str | None
    structural_tag: Mapping[str, Any] | str | None
    json_object: bool | None
    choice: str | Sequence[str] | None
    constraint_after_reasoning: bool | None
    json_whitespace: bool | None
    max_thinking_tokens: int | None
    skip_special_tokens: bool | None
    num_speculative_tokens: int | None
    draft_method: DraftMethodName | None
    prediction: Prediction | None
    request_id: str | None
    priority: int | None
    cache_salt: str | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


def make_request(prompt: Prompt, **options: Unpack[GenerateOptions]) -> pb.GenerateRequest:
    """Build a request message. Sampling requests without a seed get one, so that retries give the same tokens.

    TypeError for an unknown option or a wrong type, ValueError for a value out of range; both name the option.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    read_constraint(given)
    if given.get("temperature"):
        given.setdefault("seed", secrets.randbits(64))
    if "draft_method" in given:
        given["method"] = _draft_method(given.pop("draft_method"))
    if "prediction" in given:
        given["prediction"] = _prediction(given["prediction"])
    chat_options = {name: given.pop(name) for name in CHAT_OPTIONS if name in given}
    request = pb.GenerateRequest(sampling_params=pb.SamplingParams(), speculative=pb.SpeculativeParams())
    parts: tuple[Message, ...] = (request.sampling_params, request.speculative, request)
    for name, value in given.items():
        _set(next(part for part in parts if name in part.DESCRIPTOR.fields_by_name), name, value)
    _set_prompt(request, prompt, chat_options)
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt, chat_options: Mapping[str, Any]) -> None:
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__getitem__"):
        raise TypeError(f"a prompt must be text, a conversation or token ids, not {type(prompt).__name__}")
    is_text = isinstance(prompt, str)
    if not is_text and not (prompt and isinstance(prompt[0], int)):
        request.chat.CopyFrom(make_chat(cast(Chat, prompt), **chat_options))
        return
    if chat_options:
        raise TypeError(f"{min(chat_options)}: needs a conversation, not text or token ids")
    if is_text:
        request.text = cast(str, prompt)
    else:
        request.tokenized.input_ids.extend(cast(Sequence[int], prompt))


def _prediction(prediction: object) -> dict[str, object]:
    """Return the fields of a `Prediction` message. Raises TypeError."""
    if isinstance(prediction, str):
        return {"text": prediction}
    if isinstance(prediction, bytes | Mapping) or not hasattr(prediction, "__getitem__"):
        raise TypeError(f"prediction: must be text or token ids, not {type(prediction).__name__}")
    return {"tokenized": {"input_ids": prediction}}


def _set(message: Message, name: str, value: object) -> None:
    """Set a field. TypeError and ValueError name it."""
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _draft_method(name: object) -> str:
    if name not in get_args(DraftMethodName):
        raise ValueError(f"draft_method: {name!r} is not one of {', '.join(get_args(DraftMethodName))}")
    return f"DRAFT_METHOD_{str(name).upper()}"
