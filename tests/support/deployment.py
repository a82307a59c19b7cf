"""What the files of deploy/ start: images, and processes with the environment that their containers would have."""

import os
import shlex
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPONENTS = ("coordinator", "draft-worker", "target-worker")
WORKERS = COMPONENTS[1:]
# Imported only when needed: the workers' settings bring torch along.
SETTINGS = {
    "specpool-coordinator": ("coordinator.config.settings", "CoordinatorSettings"),
    "specpool-draft-worker": ("draft_worker.server", "DraftWorkerSettings"),
    "specpool-target-worker": ("target_worker.server", "TargetWorkerSettings"),
    "specpool generate": ("specpool.cli.generate", "GenerateSettings"),
}


def settings_of(command: str, arguments: list[str], environment: dict[str, str]) -> Any:
    """The settings that a command has in this environment; SystemExit if it would refuse to start."""
    module, name = SETTINGS[command]
    settings = getattr(import_module(module), name)
    neighbours = import_module("specpool.cli.main").known_keys() if command == "specpool generate" else ()
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.upper().startswith("SPECPOOL_")]:
            patch.delenv(variable)
        for variable, value in environment.items():
            patch.setenv(variable, value)
        return settings.load(command, arguments, neighbours)


def project() -> dict[str, Any]:
    """The project's own metadata."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@dataclass(frozen=True)
class Instruction:
    """One line of a Dockerfile, continuations joined."""

    keyword: str
    arguments: str


@cache
def stages() -> dict[str, list[Instruction]]:
    """The Dockerfile's stages; each begins with its FROM."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, list[Instruction]] = {}
    for line in filter(None, "\n".join(lines).replace("\\\n", "").splitlines()):
        instruction = Instruction(*line.split(maxsplit=1))
        if instruction.keyword == "FROM":
            current = found[instruction.arguments.split()[-1]] = []
        current.append(instruction)
    return found


def image(target: str) -> list[Instruction]:
    """All that makes the image of `target`, from its first base on."""
    base = stages()[target][0].arguments.split()[0]
    return [*(image(base) if base in stages() else []), *stages()[target]]


def arguments_of(target: str, keyword: str) -> list[str]:
    """The arguments of all `keyword` instructions of an image."""
    return [instruction.arguments for instruction in image(target) if instruction.keyword == keyword]


def image_environment(target: str) -> dict[str, str]:
    """The variables that an image sets."""
    words = [word for line in arguments_of(target, "ENV") for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)
