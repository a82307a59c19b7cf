"""Answers `specpool --help` and other requests that need no command. Works without any extra."""

import sys
from difflib import get_close_matches

from specpool.environment.process import package_version

SUMMARIES = {
    "up": "Serve a pair on this machine: coordinator, draft and target workers. Default: the embedded pair.",
    "generate": "Generate text for a PROMPT, for each line of a JSONL file, or for standard input.",
    "top": "Show a live view of a server: workers, window, speculation, rates and rounds. Ctrl-C exits.",
    "demo": "Run prompts with and without speculation, and compare the results. Default: the embedded pair.",
    "distill": "Train a small draft on dialogues that its target generates, and round its weights to 4 bits.",
    "plan": "Measure a pair and predict its speed by batch and draft length.",
}


def answer(name: str) -> int | None:
    """Answer `--help`, `--version` or an unknown command; return the exit status. None for a command."""
    if name in SUMMARIES:
        return None
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"specpool {package_version()}")
        return 0
    similar = "".join(f" (did you mean {command}?)" for command in get_close_matches(name, SUMMARIES, n=1, cutoff=0.75))
    print(f"specpool: unknown command {name}{similar}; see specpool --help", file=sys.stderr)
    return 2


def usage() -> str:
    lines = [f"  {name:10}{summary}" for name, summary in SUMMARIES.items()]
    return "\n".join(
        ["usage: specpool COMMAND [options]", "", *lines, "", "specpool COMMAND --help lists the options."]
    )
