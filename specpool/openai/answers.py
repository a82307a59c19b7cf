"""Convert coordinator responses to answers in OpenAI's format."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from specpool.openai.calls import Work
from specpool.openai.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Header:
    """The fields shared by all chunks of an answer."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass
class Usage:
    """Token counts of all samples of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    def add(self, response: pb.GenerateResponse) -> None:
        """Count a sample. The samples of a prompt share its tokens."""
        self.completion_tokens += response.usage.completion_tokens
        self.accepted_prediction_tokens += response.usage.accepted_prediction_tokens
        self.rejected_prediction_tokens += response.usage.rejected_prediction_tokens
        if response.index == 0:
            self.prompt_tokens += response.usage.prompt_tokens
            self.cached_tokens += response.usage.cached_tokens

    def shown(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_prediction_tokens,
                "rejected_prediction_tokens": self.rejected_prediction_tokens,
            },
        }


def chat_answer(header: Header, work: Work, responses: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
    """Return the answer to a chat."""
    choices = [_chat_choice(work, sample) for response in responses for sample in samples_of(response)]
    return {**vars(header), "choices": choices, "usage": _usage(responses).shown()}


def completion_answer(header: Header, work: Work, responses: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
    """Return the answer to a completion."""
    choices = [
        {
            "index": number * work.samples + sample.index,
            "text": sample.text,
            "logprobs": completion_logprobs(sample.logprobs, 0) if sample.logprobs else None,
            "finish_reason": finish_reason(sample),
            "stop_reason": stop_reason(work, sample),
        }
        for number, response in enumerate(responses)
        for sample in samples_of(response)
    ]
    return {**vars(header), "choices": choices, "usage": _usage(responses).shown()}


def samples_of(response: pb.GenerateResponse) -> Iterable[pb.GenerateResponse]:
    """Return all samples of a response."""
    return (response, *response.other_samples)


def finish_reason(sample: pb.GenerateResponse, has_calls: bool = False) -> str:
    return "tool_calls" if has_calls and sample.finish_reason == "stop" else sample.finish_reason


def stop_reason(work: Work, sample: pb.GenerateResponse) -> str | int | None:
    """Return the stop string or stop token that ended a sample, as in vLLM's API."""
    match sample.WhichOneof("matched_stop"):
        case "matched_stop_str":
            return sample.matched_stop_str
        case "matched_token_id" if sample.matched_token_id not in work.eos_token_ids:
            return sample.matched_token_id
    return None


def chat_logprobs(logprobs: Sequence[common_pb2.TokenLogprobs]) -> dict[str, Any]:
    content = [
        {
            **_token(each.text, each.logprob),
            "top_logprobs": [_token(*top) for top in zip(each.top_texts, each.top_logprobs, strict=True)],
        }
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: Sequence[common_pb2.TokenLogprobs], offset: int) -> dict[str, Any]:
    """`offset`: number of characters before these tokens."""
    tokens = [each.text for each in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [_alternatives(each) for each in logprobs],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
    }


def _usage(responses: Iterable[pb.GenerateResponse]) -> Usage:
    usage = Usage()
    for response in responses:
        for sample in samples_of(response):
            usage.add(sample)
    return usage


def _chat_choice(work: Work, sample: pb.GenerateResponse) -> dict[str, Any]:
    assert work.plan is not None
    reader = work.plan.reader(sample.starts_in_reasoning)
    deltas = [*reader.feed(sample.text), *reader.finish()]
    message = _message(delta for delta in deltas if work.with_reasoning or not isinstance(delta, Reasoning))
    return {
        "index": sample.index,
        "message": message,
        "logprobs": chat_logprobs(sample.logprobs) if sample.logprobs else None,
        "finish_reason": finish_reason(sample, "tool_calls" in message),
        "stop_reason": stop_reason(work, sample),
    }


def _message(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Join the deltas of an answer."""
    texts: dict[type, list[str]] = {Content: [], Reasoning: []}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        match delta:
            case Content(text) | Reasoning(text):
                texts[type(delta)].append(text)
            case CallStart(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    content = "".join(texts[Content])
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if texts[Reasoning]:
        message["reasoning_content"] = "".join(texts[Reasoning])
    return {**message, "tool_calls": calls} if calls else message


def _token(text: str, logprob: float) -> dict[str, Any]:
    """`bytes` is None for part of a character, whose bytes are unknown."""
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


def _alternatives(logprobs: common_pb2.TokenLogprobs) -> dict[str, float]:
    """Return the log-probabilities of the most probable tokens and of the chosen one, as in OpenAI's API."""
    return {**dict(zip(logprobs.top_texts, logprobs.top_logprobs, strict=True)), logprobs.text: logprobs.logprob}
