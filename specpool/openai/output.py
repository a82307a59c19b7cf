"""Reading of a model's answer: its reasoning, its tool calls, and the rest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from specpool.openai.deltas import CallArguments, Content, Delta, Reasoning
from specpool.openai.reasoning import read_reasoning
from specpool.openai.text_reader import Steps, TextReader
from specpool.openai.trimming import Trimmer
from specpool.v1.generation_pb2 import GetModelInfoResponse


@dataclass(frozen=True)
class OutputPlan:
    """How the answers to a request are constrained and read."""

    reasoning_begin: str = ""
    reasoning_end: str = ""
    """Tags around the model's reasoning. Empty if it has none."""
    constraint: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that make the model call tools. Empty if the tool choice constrains nothing."""
    skip_special_tokens: bool = True
    """Whether the text must come without special tokens. Tags may be special tokens."""

    def reader(self, starts_in_reasoning: bool) -> "OutputReader":
        """Return the reader of a sample. `starts_in_reasoning`: as in the response."""
        return OutputReader(self, starts_in_reasoning)

    def read(self, text: TextReader, starts_in_reasoning: bool) -> Steps[Delta, None]:
        """Parse an answer."""
        if self.reasoning_end:
            yield from read_reasoning(text, self.reasoning_begin, self.reasoning_end, starts_in_reasoning)
        yield from text.until(Content)


class OutputReader:
    """Reads one answer. The joined deltas do not depend on how the text is divided into chunks."""

    def __init__(self, plan: OutputPlan, starts_in_reasoning: bool) -> None:
        self._text = TextReader()
        self._steps = plan.read(self._text, starts_in_reasoning)
        self._trimmer = Trimmer()

    def feed(self, text: str) -> list[Delta]:
        """Read the next text. Returns what is certain by now."""
        self._text.feed(text)
        return _joined(self._trimmer.trim(self._arrived()))

    def finish(self) -> list[Delta]:
        """Return what was held back. The answer is complete."""
        self._text.end()
        return _joined(chain(self._trimmer.trim(self._arrived()), self._trimmer.finish()))

    def _arrived(self) -> Iterator[Delta]:
        while (delta := next(self._steps, None)) is not None:
            yield delta


def plan_output(
    info: GetModelInfoResponse, *, tools: Any = None, tool_choice: Any = None, parallel_tool_calls: bool = True
) -> OutputPlan:
    """Plan how to read the answers to a request. Raises ValueError("field: reason").

    `tools`, `tool_choice`: OpenAI's fields, as parsed from JSON.
    """
    tags = info.reasoning
    return OutputPlan(tags.begin, tags.end, skip_special_tokens=not tags.end)


def _joined(deltas: Iterator[Delta]) -> list[Delta]:
    """Join neighbouring deltas of the same part."""
    joined: list[Delta] = []
    for delta in deltas:
        match joined[-1] if joined else None, delta:
            case Content(text), Content(more):
                joined[-1] = Content(text + more)
            case Reasoning(text), Reasoning(more):
                joined[-1] = Reasoning(text + more)
            case CallArguments(index, text), CallArguments(_, more):
                joined[-1] = CallArguments(index, text + more)
            case _:
                joined.append(delta)
    return joined
