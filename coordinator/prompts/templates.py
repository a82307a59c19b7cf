"""Chat templates. A template is untrusted code: it runs in a sandbox, within the limits of a prompt process."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2 import TemplateSyntaxError, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import TrackingCodeGenerator
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

NO_TEMPLATE = "the target model has no chat template; send text or tokenized input"
# Variables that no option may set, besides the model's own special tokens.
RESERVED = {"messages", "tools", "add_generation_prompt"} | {
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return an environment that evaluates nothing before a template is rendered."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, loopcontrols],
        # Constants could take any time and memory. With a context, `finalize` keeps them out of the compiled code too.
        optimized=False,
        finalize=_unchanged,
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }
    return environment


def undeclared_variables(environment: ImmutableSandboxedEnvironment, source: str) -> set[str]:
    """Return the variables that a template reads but does not set, without evaluating constants."""
    generator = TrackingCodeGenerator(environment)
    generator.optimizer = None  # unlike in `find_undeclared_variables`
    generator.visit(environment.parse(source))
    return generator.undeclared_identifiers


class GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text for training. Here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - like the base class

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class TemplateDict:
    """`dict`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """`namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # an attribute may have the name `self`
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


@pass_context
def _unchanged(_: Context, value: Any) -> Any:
    return value


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
