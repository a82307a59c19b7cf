"""`specpool`: the command and its subcommands."""

import os
import sys
from collections.abc import Callable
from typing import Any

from coordinator.config.settings import CoordinatorSettings
from specpool.cli.demo import DemoSettings, demo
from specpool.cli.generate import generate
from specpool.cli.generate_settings import GenerateSettings
from specpool.cli.processes import SPIN_COUNT, ProcessFailedError, require_torch, run_module
from specpool.cli.top import TopSettings, top
from specpool.cli.up import up
from specpool.cli.up_security import SecureUpSettings
from specpool.cli.usage import answer
from specpool.engine.config.options import EngineOptions
from specpool.environment.process import python_path, quiet_broken_pipes
from specpool.openai.settings import OpenAISettings
from specpool.rpc.config.help import names_of_settings
from specpool.rpc.config.settings import Settings
from specpool.worker.settings import WorkerSettings

COMMANDS: dict[str, tuple[type[Settings], Callable[[Any], int]]] = {
    "up": (SecureUpSettings, up),
    "generate": (GenerateSettings, generate),
    "top": (TopSettings, top),
    "demo": (DemoSettings, demo),
}

MODULES = {"distill": "specpool.distill", "plan": "specpool.planning"}
"""Commands that may import torch: the package that replaces this process."""


def main(arguments: list[str] | None = None) -> None:
    name, *arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if sys.stdout is None:
        sys.exit(f"specpool {name}: standard output is closed")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - errors must not appear among the results
    for stream in filter(None, (sys.stdin, sys.stdout)):
        stream.reconfigure(encoding="utf-8")  # whatever the locale
    try:
        with quiet_broken_pipes():
            status = run(name, arguments)
    except KeyboardInterrupt:
        status = 130
    except OSError as error:  # such as a full disk
        print(f"specpool {name}: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards buffered output
        status = 1
    sys.exit(status)


def run(name: str, arguments: list[str]) -> int:
    if (status := answer(name)) is not None:
        return status
    if name in MODULES:
        try:
            if name != "plan":  # which needs torch only without running workers
                require_torch()
        except ProcessFailedError as error:
            print(f"specpool {name}: {error}", file=sys.stderr)
            return 1
        # as in the workers that `up` starts
        environment = {"GOMP_SPINCOUNT": SPIN_COUNT, **os.environ, **python_path(os.environ)}
        os.execve(sys.executable, [*run_module(MODULES[name]), *arguments], environment)
    settings, command = COMMANDS[name]
    return command(settings.load(f"specpool {name}", arguments, other_settings=known_keys()))


def known_keys() -> set[str]:
    """Return the names of the settings of all processes and commands."""
    commands = (settings for settings, _ in COMMANDS.values())
    kinds: list[type[Settings]] = [CoordinatorSettings, WorkerSettings, OpenAISettings, *commands]
    return names_of_settings(EngineOptions).union(*(settings.keys() for settings in kinds))


if __name__ == "__main__":
    main()
