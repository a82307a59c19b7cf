"""The settings of a class as data: for `--help`, and for pages generated from the settings."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from inspect import isclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import CliPositionalArg

METAVARS = {
    "addr": "HOST",
    "address": "HOST:PORT",
    "canary": "MODEL",
    "device": "DEVICE",
    "draft": "MODEL",
    "endpoint": "URL",
    "host": "HOST",
    "interval": "SECONDS",
    "kwargs": "JSON",
    "layers": "INTS",
    "model": "MODEL",
    "name": "NAME",
    "output": "PATH",
    "port": "PORT",
    "record": "DIR",
    "recording": "DIR",
    "revision": "REVISION",
    "seconds": "SECONDS",
    "target": "MODEL",
}
"""What a value is, by the last word of its setting's name."""
TYPES = {bool: "", int: "INT", float: "NUMBER", str: "TEXT", Path: "FILE", ByteSize: "SIZE", Any: "JSON"}
"""What a value is, by its type, where the name does not say."""
POSITIONAL = get_args(CliPositionalArg[str])[1]
"""Marks the fields that are positional arguments."""
SIZE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True)
class Option:
    """A setting as users see it."""

    field: str
    """Its name in a TOML file."""
    flag: str | None
    """Its name on a command line; None for a positional argument."""
    metavar: str
    """What its value is: "INT", "{a,b}"; "" for a switch."""
    default: str | None
    """Its default as typed; None if there is none, or if the description explains it."""
    is_required: bool
    description: str

    @property
    def help(self) -> str:
        """The description with the default."""
        if self.is_required:
            return f"{self.description} (required)"
        return self.description if self.default is None else f"{self.description} (default: {self.default})"


def options_of(settings: type[BaseModel]) -> list[Option]:
    """Return all settings of a class, in the order of `--help`."""
    return [
        Option(
            field=(name := name_of(field_name, field)),
            flag=None if POSITIONAL in field.metadata else f"--{name.replace('_', '-')}",
            metavar=field_name.upper() if POSITIONAL in field.metadata else _metavar(field.annotation, field_name),
            default=_as_typed(field.default),
            is_required=field.is_required(),
            description=field.description or "",
        )
        for field_name, field in settings.model_fields.items()
    ]


def name_of(name: str, field: FieldInfo) -> str:
    """Return the name of a setting for users."""
    return str(field.validation_alias or name)


def names_of_settings(model: type[BaseModel]) -> set[str]:
    """Return the names that set the fields of the model."""
    return {name_of(name, field) for name, field in model.model_fields.items()}


def with_flags(settings: type[BaseModel], text: str) -> str:
    """Replace names of settings in a message by their flags, such as --max-model-len.

    Keeps single-word names, which may be ordinary words. A name at the start of a message gets no dashes.
    """
    flags = {option.field: option.flag for option in options_of(settings) if option.flag and "_" in option.field}
    names = "|".join(sorted(flags, key=len, reverse=True))  # the longest first

    def flag(match: re.Match[str]) -> str:
        found = str(flags[match[1]])
        return found.removeprefix("--") if match.start() == 0 and text[match.end() :].startswith(":") else found

    return re.sub(rf"(?<![\w/.\"-])({names})(?!\w|\.\w|/)", flag, text) if flags else text


def show_options(parser: argparse.ArgumentParser, settings: type[BaseModel]) -> None:
    """Describe the settings in the parser's help as `options_of` does, instead of by their Python types."""
    options = {option.flag or option.field: option for option in options_of(settings)}
    for action in parser._actions:
        if (option := options.get((*action.option_strings, action.dest)[0])) is not None:
            action.help = with_flags(settings, option.help).replace("%", "%%")
            action.metavar = option.metavar or None


def _metavar(annotation: Any, name: str) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _metavar(arguments[0], name)
    if origin in (Union, UnionType):
        members = [argument for argument in arguments if argument is not NoneType]
        return _metavar(members[0] if len(members) == 1 else Any, name)
    if origin in (list, tuple):
        return f"{_metavar(arguments[0], name.removesuffix('s'))}S"
    if origin is Literal:
        return _choices(arguments)
    if isclass(annotation) and issubclass(annotation, Enum):
        return _choices(member.value for member in annotation)
    by_type = TYPES.get(annotation, "VALUE")
    return METAVARS.get(name.rpartition("_")[2], by_type) if by_type not in ("", "SIZE") else by_type


def _choices(values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    return f"{{{','.join(texts)}}}" if len(texts) > 1 else texts[0]


def _as_typed(value: object) -> str | None:
    if value in (None, PydanticUndefined, (), []):
        return None
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, ByteSize):
        return next((f"{value // unit}{name}" for unit, name in SIZE_UNITS if value % unit == 0), str(int(value)))
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
