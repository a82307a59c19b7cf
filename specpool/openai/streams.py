"""Server-sent events of streamed answers."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from specpool.openai.answers import (
    Header,
    Usage,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
    stop_reason,
)
from specpool.openai.calls import Work
from specpool.openai.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from specpool.openai.output import OutputReader
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb

DONE = b"data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


@dataclass
class Sample:
    """A streamed sample."""

    reader: OutputReader
    has_calls: bool = False
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of tokens that no event has shown yet."""


class EventStream:
    """Converts streamed messages to events."""

    def __init__(self, header: Header, work: Work, with_usage: bool) -> None:
        self._work, self._with_usage = work, with_usage
        common = _encode(vars(header))[:-1]
        self._before = f'data: {common},"choices":['
        self._after = '],"usage":null}\n\n' if with_usage else "]}\n\n"
        self._usage = Usage()

    def feed(self, number: int, message: pb.GenerateStreamResponse) -> bytes:
        """Return the events of a message. `number`: index of the prompt."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Return the last events."""
        if not self._with_usage:
            return DONE
        return (self._before + f'],"usage":{_encode(self._usage.shown())}}}\n\n').encode() + DONE

    def _event(self, choice: dict[str, Any]) -> str:
        return self._before + _encode(choice) + self._after


class ChatStream(EventStream):
    """Events of a chat."""

    def __init__(self, header: Header, work: Work, with_usage: bool) -> None:
        super().__init__(header, work, with_usage)
        self._samples: dict[int, Sample] = {}

    def feed(self, number: int, message: pb.GenerateStreamResponse) -> bytes:
        is_chunk = message.WhichOneof("response") == "chunk"
        part = message.chunk if is_chunk else message.complete
        index, events = part.index, []
        sample = self._samples.get(index)
        if sample is None:
            assert self._work.plan is not None
            sample = self._samples[index] = Sample(self._work.plan.reader(message.starts_in_reasoning))
            events.append(self._event(_choice(index, {"role": "assistant", "content": ""})))
        if is_chunk:
            sample.logprobs.extend(message.chunk.logprobs)
            deltas = sample.reader.feed(message.chunk.text)
        else:
            deltas = sample.reader.finish()
        events += [self._delta_event(index, sample, delta) for delta in deltas if self._is_shown(delta)]
        if not is_chunk:
            events.append(self._finish_event(sample, message.complete))
        return "".join(events).encode()

    def _is_shown(self, delta: Delta) -> bool:
        return self._work.with_reasoning or not isinstance(delta, Reasoning)

    def _delta_event(self, index: int, sample: Sample, delta: Delta) -> str:
        sample.has_calls = sample.has_calls or isinstance(delta, CallStart)
        choice = _choice(index, _delta(delta))
        _take_logprobs(choice, sample)
        return self._event(choice)

    def _finish_event(self, sample: Sample, complete: pb.GenerateResponse) -> str:
        self._usage.add(complete)
        reason = finish_reason(complete, sample.has_calls)
        choice = _choice(complete.index, {}) | {
            "finish_reason": reason,
            "stop_reason": stop_reason(self._work, complete),
        }
        _take_logprobs(choice, sample)
        return self._event(choice)


class CompletionStream(EventStream):
    """Events of a completion."""

    def __init__(self, header: Header, work: Work, with_usage: bool) -> None:
        super().__init__(header, work, with_usage)
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """Characters of each sample's tokens so far."""

    def feed(self, number: int, message: pb.GenerateStreamResponse) -> bytes:
        if message.WhichOneof("response") == "chunk":
            chunk = message.chunk
            choice = self._text_choice(number, chunk.index, chunk.text)
            if chunk.logprobs:
                offset = self._offsets[choice["index"]]
                choice["logprobs"] = completion_logprobs(chunk.logprobs, offset)
                self._offsets[choice["index"]] = offset + sum(len(each.text) for each in chunk.logprobs)
        else:
            self._usage.add(message.complete)
            choice = self._text_choice(number, message.complete.index, "")
            choice["finish_reason"] = finish_reason(message.complete)
            choice["stop_reason"] = stop_reason(self._work, message.complete)
        return self._event(choice).encode()

    def _text_choice(self, number: int, index: int, text: str) -> dict[str, Any]:
        index += number * self._work.samples
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _take_logprobs(choice: dict[str, Any], sample: Sample) -> None:
    """Move the sample's pending log-probabilities to an event."""
    if sample.logprobs:
        choice["logprobs"] = chat_logprobs(sample.logprobs)
        sample.logprobs = []
