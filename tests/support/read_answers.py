"""Parse complete answers with the HTTP server's parsers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specpool.openai.deltas import CallStart, Content, Delta, Reasoning
from specpool.openai.output import OutputPlan

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}


def tool(name: str, parameters: Any = PLACE, **fields: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's format."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


@dataclass
class Answer:
    """A complete answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Names and arguments."""

    def add(self, delta: Delta) -> None:
        """Append a part of the answer."""
        if isinstance(delta, Content):
            self.content += delta.text
        elif isinstance(delta, Reasoning):
            self.reasoning += delta.text
        elif isinstance(delta, CallStart):
            assert delta.index == len(self.calls)
            self.calls.append([delta.name, ""])
        else:
            assert delta.index == len(self.calls) - 1
            self.calls[-1][1] += delta.text

    @property
    def parsed_calls(self) -> list[tuple[str, Any]]:
        """Names and parsed arguments."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(plan: OutputPlan, chunks: Sequence[str], starts_in_reasoning: bool = False) -> Answer:
    """Read an answer that arrives in chunks."""
    answer, reader = Answer(), plan.reader(starts_in_reasoning)
    for deltas in (*map(reader.feed, chunks), reader.finish()):
        for delta in deltas:
            answer.add(delta)
    return answer
