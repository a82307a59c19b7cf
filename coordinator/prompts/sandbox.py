"""The Jinja environment of chat templates: filters, functions and tags as in transformers, which is slow to import."""

import json
from datetime import datetime
from typing import Any

from jinja2 import pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import TrackingCodeGenerator
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


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
