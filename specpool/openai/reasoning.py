"""Parse the reasoning block at the beginning of an answer."""

from specpool.openai.deltas import Content, Delta, Reasoning
from specpool.openai.text_reader import Steps, TextReader


def read_reasoning(text: TextReader, begin: str, end: str, starts_in_reasoning: bool) -> Steps[Delta, None]:
    """Read a reasoning block, if the answer begins with one.

    `begin`, `end`: tags around the block. `starts_in_reasoning`: the prompt contains the begin tag.
    """
    if not starts_in_reasoning:
        leading = yield from text.skip_all()
        if not begin or not (yield from text.skip(begin)):
            yield Content(leading)
            return
    yield Reasoning("")
    yield from text.until(Reasoning, end)
