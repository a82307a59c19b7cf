"""Chat templates. A template is untrusted code: it runs in a sandbox, within the limits of a prompt process."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateSyntaxError

from coordinator.prompts.sandbox import make_environment, undeclared_variables

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
        environment = make_environment()
        try:
            self._template = environment.from_string(source)
            variables = undeclared_variables(environment, source)
        except Exception as error:  # including RecursionError, MemoryError and SyntaxError
            raise ValueError(f"the chat template does not compile: {_reason(error)}") from None
        self._special_tokens = special_tokens
        self.reads_tools = "tools" in variables
        self.options = variables - environment.globals.keys() - RESERVED - special_tokens.keys()
        """Names of the variables that requests may set."""

    def render(self, chat: Chat, max_characters: float) -> str:
        """Render a chat, up to the assistant's turn. Raises ChatTemplateError, MemoryError."""
        variables = {
            "documents": None,
            **chat.options,
            "messages": chat.messages,
            "tools": chat.tools or None,
            "add_generation_prompt": True,
            **self._special_tokens,
        }
        try:
            return "".join(_limited(self._template.generate(variables), max_characters))
        except (ChatTemplateError, MemoryError):
            raise
        except Exception as error:  # a template may raise anything
            raise ChatTemplateError(f"the model's chat template rejects these messages: {_reason(error)}") from None


def _limited(pieces: Iterable[str], max_characters: float) -> list[str]:
    """Collect the pieces. Raises ChatTemplateError if they are too long."""
    collected: list[str] = []
    length = 0
    for piece in pieces:
        collected.append(piece)
        if (length := length + len(piece)) > max_characters:
            raise ChatTemplateError(f"the rendered conversation has more than {max_characters:g} characters")
    return collected


def _reason(error: Exception) -> str:
    """Return the message of a template's own error. Other errors need the type to be understood."""
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    name, text = type(error).__name__, str(error)
    return text if text and name == "TemplateError" else f"{name}: {text}" if text else name
