"""Chat templates. A template is untrusted code: it runs in a sandbox with limits on time and output."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, meta

# CPU seconds of a template on its thread. Time that a busy machine spends elsewhere does not count.
MAX_SECONDS = 3.0
# Traced lines between two checks of the clock.
LINES_PER_CHECK = 64
# Maximum length of a repeated sequence, and bits of a number. The time limit cannot interrupt larger operations.
MAX_SEQUENCE_LENGTH = 1_000_000
MAX_BITS = 4096
# Maximum size of a template's file.
MAX_FILE_BYTES = 2**20
# Variables that no option may set, besides the model's own special tokens.
RESERVED = {"messages", "tools", "add_generation_prompt"} | {
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}


class ChatTemplateError(ValueError):
    """The model has no chat template, or the template rejects the messages."""


@dataclass(frozen=True)
class Chat:
    """A conversation as plain data."""

    messages: Sequence[Mapping[str, Any]]
    """Each with a role."""
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template."""


class ChatTemplate:
    """A compiled chat template, with the variables, filters and functions of transformers."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raise ValueError if the template does not compile."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except Exception as error:  # including RecursionError and SyntaxError
            raise ValueError(f"the chat template does not compile: {_reason(error)}") from None
        self._special_tokens = special_tokens
        self.reads_tools = "tools" in variables
        self.options = variables - environment.globals.keys() - RESERVED - special_tokens.keys()
        """Names of the variables that requests may set."""

    def render(self, chat: Chat, max_characters: float, check: Callable[[], None]) -> str:
        """Render a chat, up to the assistant's turn. Raises ChatTemplateError.

        `check` runs periodically and may raise to end the work.
        """
        variables = {
            "documents": None,
            **chat.options,
            "messages": chat.messages,
            "tools": chat.tools or None,
            "add_generation_prompt": True,
            **self._special_tokens,
        }
        try:
            return "".join(_limited(self._template.generate(variables), max_characters, check))
        except ChatTemplateError:
            raise
        except Exception as error:  # a template may raise anything
            raise ChatTemplateError(f"the model's chat template rejects these messages: {_reason(error)}") from None


def import_library() -> None:
    """Import transformers, which takes most of a second: the server should listen before."""
    # It warns if torch is missing, which is normal here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers.utils.chat_template_utils  # noqa: F401


def read_template(path: Path) -> str:
    """Return the template of a file. Raises ValueError if it cannot be read or does not compile."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not source.strip():
        raise ValueError(f"{path} is empty")
    try:
        ChatTemplate(source, {})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return source


def _environment() -> Any:
    """Return the sandbox of transformers, with limits on `*` and `**`."""
    import_library()
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template("").environment.overlay()
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.binop_table = {**environment.binop_table, "*": _product, "**": _power}
    return environment


def _product(left: Any, right: Any) -> Any:
    numbers = [factor for factor in (left, right) if isinstance(factor, int)]
    lengths = [len(factor) for factor in (left, right) if isinstance(factor, str | list | tuple)]
    if sum(map(int.bit_length, numbers)) > MAX_BITS or (lengths and math.prod(lengths + numbers) > MAX_SEQUENCE_LENGTH):
        raise OverflowError("a product is too large")
    return left * right


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise OverflowError("a power is too large")
    return base**exponent


def _limited(pieces: Iterable[str], max_characters: float, check: Callable[[], None]) -> list[str]:
    """Collect the pieces. Raises ChatTemplateError if they are too long or take too long, even within a piece."""
    collected: list[str] = []
    length, previous = 0, sys.gettrace()
    sys.settrace(_tracer(check))
    try:
        for piece in pieces:
            collected.append(piece)
            if (length := length + len(piece)) > max_characters:
                raise ChatTemplateError(f"the rendered conversation has more than {max_characters:g} characters")
    finally:
        sys.settrace(previous)
    return collected


def _tracer(check: Callable[[], None]) -> Any:
    """Return a trace function, which Python calls at every line. It can interrupt an endless loop."""
    deadline, lines = time.thread_time() + MAX_SECONDS, 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines % LINES_PER_CHECK == 0:
            check()
            if time.thread_time() > deadline:
                raise ChatTemplateError(f"the model's chat template takes more than {MAX_SECONDS:g} s")
        return trace

    return trace


def _reason(error: Exception) -> str:
    """Return the message of a template's own error. Other errors need the type to be understood."""
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    name, text = type(error).__name__, str(error)
    return text if text and name == "TemplateError" else f"{name}: {text}" if text else name
