"""`specpool`: one command, a few subcommands, each with settings of its own."""

import os
import sys
from collections.abc import Callable
from typing import Any

from coordinator.config.settings import CoordinatorSettings
from specpool.cli.demo import DemoSettings, demo
from specpool.cli.generate import GenerateSettings, generate
from specpool.cli.processes import ProcessFailedError, require_torch, run_module
from specpool.cli.top import TopSettings, top
from specpool.cli.up import SecureUpSettings, up
from specpool.engine.config.options import EngineOptions
from specpool.rpc.config.settings import Settings, names_of_settings
from specpool.worker.settings import WorkerSettings

COMMANDS: dict[str, tuple[type[Settings], Callable[[Any], int]]] = {
    "up": (SecureUpSettings, up),
    "generate": (GenerateSettings, generate),
    "top": (TopSettings, top),
    "demo": (DemoSettings, demo),
}

# Commands whose code needs torch: the module that replaces this process, and what it does.
ELSEWHERE = {
    "distill": ("specpool.distill.main", "Trains a small draft on what its target writes."),
    "plan": ("specpool.planning.main", "Measures a pair, and predicts its speed by batch and draft length."),
}


def main() -> None:
    """Entry point of `specpool`."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if sys.stdout is None:
        sys.exit(f"specpool {name}: standard output is closed")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - errors must not come out among the results
    for stream in filter(None, (sys.stdin, sys.stdout)):
        stream.reconfigure(encoding="utf-8")  # whatever the locale, as our files are
    try:
        try:
            status = run(name, arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except OSError as error:  # the reader of our output is gone, or the disk is full
        print(f"specpool {name}: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is still buffered
        status = 1
    sys.exit(status)


def run(name: str, arguments: list[str]) -> int:
    """Runs a command; returns its exit status."""
    if name in ELSEWHERE:
        try:
            require_torch()
        except ProcessFailedError as error:
            print(f"specpool {name}: {error}", file=sys.stderr)
            return 1
        os.execv(sys.executable, [*run_module(ELSEWHERE[name][0]), *arguments])
    if name not in COMMANDS:
        asked = name in ("-h", "--help")
        print(usage(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    settings, command = COMMANDS[name]
    return command(settings.load(f"specpool {name}", arguments, other_settings=known_keys()))


def known_keys() -> set[str]:
    """Names of the settings of all processes and commands."""
    commands = (settings for settings, _ in COMMANDS.values())
    kinds: list[type[Settings]] = [CoordinatorSettings, WorkerSettings, *commands]
    return names_of_settings(EngineOptions).union(*(settings.keys() for settings in kinds))


def usage() -> str:
    """The text that `specpool --help` prints."""
    lines = [f"  {name:10}{_summary(settings)}" for name, (settings, _) in COMMANDS.items()]
    lines += [f"  {name:10}{summary}" for name, (_, summary) in ELSEWHERE.items()]
    return "\n".join(
        ["usage: specpool COMMAND [options]", "", *lines, "", "specpool COMMAND --help lists the options."]
    )


def _summary(settings: type[Settings]) -> str:
    return (settings.__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    main()
