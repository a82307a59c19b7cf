"""What the command line, the environment and the TOML file give, before it is validated as settings."""

import argparse
import json
import os
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from specpool.rpc.config.help import names_of_settings, with_flags

ENV_PREFIX = "SPECPOOL_"
MAX_SHOWN = 40
"""Maximum length of a value in an error message."""


def check_utf8(arguments: list[str]) -> None:
    """Raise ValueError for an argument or variable that is not UTF-8."""
    variables = [f"{name}={value}" for name, value in os.environ.items() if name.upper().startswith(ENV_PREFIX)]
    for word in (*arguments, *variables):
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{word!a} is not UTF-8") from None


def check_variables(keys: set[str]) -> None:
    """Raise ValueError for a variable of an unknown setting, or two variables of one setting."""
    given = {name: name.upper().removeprefix(ENV_PREFIX).lower() for name in os.environ}
    given = {name: key for name, key in given.items() if name.upper().startswith(ENV_PREFIX)}
    unknown = sorted(name for name, key in given.items() if key not in keys)
    if unknown:
        similar = suggest((name.upper() for name in unknown), (key.upper() for key in keys), ENV_PREFIX)
        raise ValueError(f"unknown environment variable {', '.join(unknown)}{similar}")


def config_file_of(arguments: list[str]) -> str | None:
    """Return the path of the TOML file, from the command line or the environment."""
    variables = {name.upper(): value for name, value in os.environ.items()}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", default=variables.get(ENV_PREFIX + "CONFIG"))
    try:
        path: str | None = parser.parse_known_args(arguments)[0].config
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    return path


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file. Raises ValueError if it cannot be used."""
    if not path.is_file():
        raise ValueError(f"config: no such file: {path}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config: {path}: {error}") from None
    if "config" in values:
        raise ValueError(f"config: {path}: a config file cannot name another config file")
    return values


def explain(settings: type[BaseModel], problem: ErrorDetails, file: str | None, file_values: dict[str, Any]) -> str:
    """Describe an invalid setting in one line. Names the TOML file if the value comes from there."""
    key = ".".join(map(str, problem["loc"]))  # empty if settings conflict
    if problem["type"] == "extra_forbidden":
        return f"config: {file}: unknown setting {key}{suggest([key], names_of_settings(settings))}"
    if problem["type"] == "missing":
        return f"{key.replace('_', '-')}: required: set it, for example with {ENV_PREFIX}{key.upper()}"
    reason = problem["msg"].removeprefix("Value error, ") + _shown(problem)
    if problem["input"] == "" and problem["type"] == "string_too_short":
        reason = "must not be empty"
    if key and _is_from(file_values, problem):
        return f"config: {file}: {key}: {reason}"
    reason = with_flags(settings, reason)
    return f"{key.replace('_', '-')}: {reason}" if key else reason


def suggest(words: Iterable[str], known: Iterable[str], prefix: str = "") -> str:
    """Return a suffix for an error message, such as " (did you mean --port?)". Empty if no known name is similar.

    `prefix`: prefix of the words, which the known names lack.
    """
    names = sorted(known)
    found = (get_close_matches(word.removeprefix(prefix), names, n=1, cutoff=0.75) for word in words)
    matches = [f"{prefix}{name}" for close in found for name in close]
    return f" (did you mean {', '.join(matches)}?)" if matches else ""


def _shown(problem: ErrorDetails) -> str:
    """Return the invalid value in parentheses, unless it is not plain or the message describes it."""
    value = problem["input"]
    if problem["type"] == "value_error" or not isinstance(value, str | int | float):
        return ""
    text = json.dumps(value, ensure_ascii=False)
    return f" (got {text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + '...'})"


def _is_from(values: Any, problem: ErrorDetails) -> bool:
    try:
        return bool(reduce(getitem, problem["loc"], values) == problem["input"])
    except (LookupError, TypeError):
        return False
