"""Split a model's answer into reasoning, tool calls and content."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from specpool.openai.deltas import Delta, joined
from specpool.openai.reasoning import read_reasoning
from specpool.openai.text_reader import Steps, TextReader, collected
from specpool.openai.tool_calls import Calls
from specpool.openai.tool_formats import CONTENT, FORMATS, JSON_LIST, ToolFormat
from specpool.openai.tools import ToolChoice, read_tool_choice
from specpool.openai.trimming import Trimmer
from specpool.v1.generation_pb2 import GetModelInfoResponse, ReasoningTags


@dataclass(frozen=True)
class OutputPlan:
    """How the answers to a request are constrained and read."""

    format: ToolFormat
    choice: ToolChoice
    reasoning: ReasoningTags
    """Tags around the model's reasoning. Empty if it has none."""
    parallel: bool
    """Whether an answer may have several calls."""
    constraint: Mapping[str, Any]
    """Fields of `SamplingParams` that enforce the tool choice. Empty if there is nothing to enforce."""

    @property
    def skip_special_tokens(self) -> bool:
        """Whether the text must come without special tokens. Tags may be special tokens."""
        return self.format is CONTENT and not self.reasoning.end

    def reader(self, starts_in_reasoning: bool) -> "OutputReader":
        """Return the reader of a sample. `starts_in_reasoning`: as in the response."""
        return OutputReader(self, starts_in_reasoning)

    def read(self, text: TextReader, starts_in_reasoning: bool) -> Steps[Delta, None]:
        """Parse an answer."""
        if self.reasoning.end and not self.format.reads_reasoning:
            yield from read_reasoning(text, self.reasoning.begin, self.reasoning.end, starts_in_reasoning)
        schemas = {function.name: function.parameters for function in self.choice.functions}
        yield from self.format.read(text, Calls(schemas, self.parallel, self.format.new_id))
        yield from collected(text.until(str))  # drop text after the only call that the request allows


def plan_output(
    info: GetModelInfoResponse, *, tools: Any = None, tool_choice: Any = None, parallel_tool_calls: bool = True
) -> OutputPlan:
    """Plan how to read the answers to a request. Raises ValueError("field: reason").

    `tools`, `tool_choice`: OpenAI's fields, as parsed from JSON.
    """
    choice = read_tool_choice(tools, tool_choice)
    format = _format_of(info.tool_call_format, choice)
    parallel = parallel_tool_calls and not choice.is_named
    constraint = _constraint(format, choice, parallel)
    if constraint and info.reasoning.end:
        constraint = {"constraint_after_reasoning": True, **constraint}
    return OutputPlan(format, choice, info.reasoning, parallel, constraint)


def _format_of(name: str, choice: ToolChoice) -> ToolFormat:
    format = FORMATS.get(name, CONTENT)
    if choice.mode == "required" and format.grammar is None:
        return JSON_LIST
    return CONTENT if choice.mode == "none" and not format.reads_reasoning else format


def _constraint(format: ToolFormat, choice: ToolChoice, parallel: bool) -> Mapping[str, Any]:
    if format.grammar is None:
        return {}
    if choice.mode == "required":
        return format.grammar.required(choice.functions, parallel)
    has_strict = any(function.strict for function in choice.functions)
    return format.grammar.strict(choice.functions, parallel) if has_strict else {}


class OutputReader:
    """Reads one answer. The joined deltas do not depend on how the text is divided into chunks."""

    def __init__(self, plan: OutputPlan, starts_in_reasoning: bool) -> None:
        self._text = TextReader()
        self._steps = plan.read(self._text, starts_in_reasoning)
        self._trimmer = Trimmer(may_call=bool(plan.choice.functions))

    def feed(self, text: str) -> list[Delta]:
        """Read more text. Returns the deltas that no later text can change."""
        self._text.feed(text)
        return joined(self._trimmer.trim(self._arrived()))

    def finish(self) -> list[Delta]:
        """Mark the end of the answer. Returns the deltas held back."""
        self._text.end()
        return joined(chain(self._trimmer.trim(self._arrived()), self._trimmer.finish()))

    def _arrived(self) -> Iterator[Delta]:
        while (delta := next(self._steps, None)) is not None:
            yield delta
