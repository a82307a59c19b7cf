"""`specpool`: one command, a few subcommands, each with settings of its own."""

import sys
from collections.abc import Callable
from typing import Any

from coordinator.commands.demo import DemoSettings, demo
from coordinator.commands.generate import GenerateSettings, generate
from coordinator.commands.up import UpSettings, up
from rpc.settings import Settings

COMMANDS: dict[str, tuple[type[Settings], Callable[[Any], int]]] = {
    "up": (UpSettings, up),
    "generate": (GenerateSettings, generate),
    "demo": (DemoSettings, demo),
}


def main() -> None:
    """Entry point of `specpool`."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        asked = name in ("-h", "--help")
        print(usage(), file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    settings, command = COMMANDS[name]
    sys.exit(command(settings.load(f"specpool {name}", arguments)))


def usage() -> str:
    """What `specpool --help` prints."""
    lines = [f"  {name:10}{_summary(settings)}" for name, (settings, _) in COMMANDS.items()]
    return "\n".join(
        ["usage: specpool COMMAND [options]", "", *lines, "", "specpool COMMAND --help lists the options."]
    )


def _summary(settings: type[Settings]) -> str:
    return (settings.__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    main()
