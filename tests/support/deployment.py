"""Parses the Dockerfile and loads settings with the environment of a container."""

import os
import shlex
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
WORKERS = ("draft-worker", "target-worker")
COMPONENTS = ("coordinator", *WORKERS)
# Imported on demand: the settings of the workers import torch.
SETTINGS = {
    "specpool-coordinator": ("coordinator.config.settings", "CoordinatorSettings"),
    "specpool-draft-worker": ("draft_worker.server", "DraftWorkerSettings"),
    "specpool-target-worker": ("target_worker.server", "TargetWorkerSettings"),
    "specpool-openai": ("specpool.openai.settings", "OpenAISettings"),
    "specpool generate": ("specpool.cli.generate_settings", "GenerateSettings"),
}


def settings_class(command: str) -> Any:
    module, name = SETTINGS[command]
    return getattr(import_module(module), name)


def settings_of(command: str, arguments: list[str], environment: dict[str, str]) -> Any:
    """Return a command's settings in this environment. SystemExit if the command would refuse to start."""
    neighbours = import_module("specpool.cli.main").known_keys() if command == "specpool generate" else ()
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.upper().startswith("SPECPOOL_")]:
            patch.delenv(variable)
        for variable, value in environment.items():
            patch.setenv(variable, value)
        return settings_class(command).load(command, arguments, neighbours)


@cache
def project() -> dict[str, Any]:
    """Return the contents of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


class Instruction(NamedTuple):
    """One instruction of a Dockerfile with continuation lines joined."""

    keyword: str
    arguments: str


@cache
def stages() -> dict[str, list[Instruction]]:
    """Return the Dockerfile's stages; each starts with its FROM."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    parsed: dict[str, list[Instruction]] = {}
    for line in filter(None, "\n".join(lines).replace("\\\n", "").splitlines()):
        instruction = Instruction(*line.split(maxsplit=1))
        if instruction.keyword == "FROM":
            current = parsed[instruction.arguments.split()[-1]] = []
        current.append(instruction)
    return parsed


def arguments_of(target: str, keyword: str) -> list[str]:
    """Return the arguments of all `keyword` instructions of an image, base stages first."""
    base = stages()[target][0].arguments.split()[0]
    inherited = arguments_of(base, keyword) if base in stages() else []
    return inherited + [arguments for name, arguments in stages()[target] if name == keyword]


def image_environment(target: str) -> dict[str, str]:
    """Return the variables that an image sets."""
    words = [word for line in arguments_of(target, "ENV") for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)
