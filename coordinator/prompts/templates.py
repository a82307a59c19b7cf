"""The chat template of a model. It is code from elsewhere: it runs in a sandbox, with limits of time and output."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template

# Processor seconds that a template may take on its thread: time that a busy machine spends elsewhere does not count.
MOST_SECONDS = 3.0
# Steps of a template between two looks at the clock.
STEPS_A_LOOK = 64
# Most characters or items of a product, and bits of a number: no time limit can interrupt the computation of a larger
# one.
LARGEST_PRODUCT = 1_000_000
MOST_BITS = 4096


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template does not take these messages."""


class ChatTemplate:
    """A compiled chat template. It sees the same variables, filters and functions as in transformers."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """ValueError if the template does not compile."""
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # also RecursionError and SyntaxError
            raise ValueError(f"the chat template does not compile: {_reason(error)}") from None
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[tuple[str, str]], most_characters: float, check: Callable[[], None]) -> str:
        """The text of a conversation of (role, content), up to where the assistant's turn begins. ChatTemplateError.

        `check` is called every now and then; what it raises ends the work.
        """
        variables = {
            "messages": [{"role": role, "content": content} for role, content in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
        }
        try:
            return "".join(_limited(self._template.generate(variables), most_characters, check))
        except ChatTemplateError:
            raise
        except Exception as error:  # whatever a template does wrong, and it may do anything
            raise ChatTemplateError(f"the model's chat template refuses these messages: {_reason(error)}") from None


def _environment() -> Any:
    """The sandbox of transformers, with limits on products too."""
    environment = _compile_jinja_template("").environment.overlay()
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.binop_table = {**environment.binop_table, "*": _product, "**": _power}
    return environment


def _product(one: Any, other: Any) -> Any:
    numbers = [each for each in (one, other) if isinstance(each, int)]
    lengths = [len(each) for each in (one, other) if isinstance(each, str | list | tuple)]
    if sum(map(int.bit_length, numbers)) > MOST_BITS or (lengths and math.prod(lengths + numbers) > LARGEST_PRODUCT):
        raise OverflowError("a product is too large")
    return one * other


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MOST_BITS:
        raise OverflowError("a power is too large")
    return base**exponent


def _limited(pieces: Iterable[str], most_characters: float, check: Callable[[], None]) -> list[str]:
    """The pieces, unless they are too long or take too long: then ChatTemplateError, even in the middle of a piece."""
    taken: list[str] = []
    written, before = 0, sys.gettrace()
    sys.settrace(_tracer(check))
    try:
        for piece in pieces:
            taken.append(piece)
            if (written := written + len(piece)) > most_characters:
                raise ChatTemplateError(f"the rendered conversation has more than {most_characters:g} characters")
    finally:
        sys.settrace(before)
    return taken


def _tracer(check: Callable[[], None]) -> Any:
    """A trace function, which Python calls at every line: it can end code that does not end by itself."""
    ends, steps = time.thread_time() + MOST_SECONDS, 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps % STEPS_A_LOOK == 0:
            check()
            if time.thread_time() > ends:
                raise ChatTemplateError(f"the model's chat template takes more than {MOST_SECONDS:g} s")
        return trace

    return trace


def _reason(error: Exception) -> str:
    """The message of a template's own refusal; of other errors the type too, without which few can be understood."""
    name, text = type(error).__name__, str(error)
    return text if text and name == "TemplateError" else f"{name}: {text}" if text else name
