"""Shell commands of the README and the docs: code blocks, and our own commands in the text.

Every indented block and every block fenced as `sh` has commands. A line `<!-- needs: NAME, ... -->` before a block says
what its commands need and no test has.
"""

import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specpool.cli import main as cli
from specpool.rpc.config.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "deploy/README.md")}
PAGES |= {f"docs/{page.name}": page.read_text() for page in sorted(ROOT.glob("docs/*.md"))}
NEEDS = {"cluster", "docker", "prometheus", "qwen3", "vllm"}
"""What a block may need."""
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
NEED = r"(?:<!-- needs: ([\w, ]+) -->\n\n?)?"
BLOCK = re.compile(NEED + r"(?:^```sh\n(.*?)^```$|(?<=\n\n)((?:^ {4}[^\n]*\n)+))", re.DOTALL | re.MULTILINE)
OURS = re.compile(r"(?:specpool(?:-[a-z]+)*|python -m [\w.]+|make [\w-]+) ")


# Settings of the commands that are not in `specpool.cli.main.COMMANDS`.
SETTINGS = {
    "specpool distill": "specpool.distill.settings.DistillSettings",
    "specpool plan": "specpool.planning.main.PlanSettings",
    "specpool-coordinator": "coordinator.config.settings.CoordinatorSettings",
    "specpool-draft-worker": "draft_worker.server.DraftWorkerSettings",
    "specpool-openai": "specpool.openai.settings.OpenAISettings",
    "specpool-target-worker": "target_worker.server.TargetWorkerSettings",
    "python -m specpool.distill.evaluate": "specpool.distill.evaluate.EvaluateSettings",
}


@dataclass(frozen=True)
class Command:
    """One simple command. `text`: the whole line of the page, for those that run it."""

    page: str
    words: tuple[str, ...]
    text: str
    needs: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"

    @property
    def program(self) -> str:
        return self.words[0]


def fences() -> Iterator[tuple[str, str, str]]:
    """Yield page, language and text of every fenced block."""
    for name, page in PAGES.items():
        yield from ((name, language, text) for _, language, text in FENCE.findall(page))


def commands_of(name: str) -> Iterator[Command]:
    """Yield the commands of a page."""
    page = FENCE.sub(lambda fence: fence[0] if fence[2] == "sh" else "", PAGES[name])
    for needs, fenced, indented in BLOCK.findall(page):
        for text in lines_of(fenced or re.sub("^    ", "", indented, flags=re.MULTILINE)):
            for words in simple_commands(text):
                yield Command(name, words, text, frozenset(re.findall(r"\w+", needs)))
    for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", page)):
        if OURS.match(code):
            text = re.sub(r"[\[\]]", "", code)  # brackets mark optional arguments
            yield Command(name, tuple(shlex.split(text)), text)


def lines_of(block: str) -> Iterator[str]:
    """Yield the commands of a block with their continuation lines."""
    text = ""
    for line in block.splitlines():
        text += line
        if text.endswith("\\"):
            text = text[:-1]
        elif is_complete(text):
            yield text
            text = ""
        else:
            text += "\n"
    assert not text, f"incomplete command: {text}"


def is_complete(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:  # an open quotation
        return False
    return True


def simple_commands(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command of a line, without redirections, variables and the folder of the environment."""
    words = shlex.shlex(text, posix=True, punctuation_chars=";|&>")
    words.whitespace_split = True
    found: list[str] = []
    for word in [*words, ";"]:
        if not set(word) <= set(";|&"):
            found.append(word)
        elif found:
            found = found[: found.index(">")] if ">" in found else found
            while found[0] == "env" or re.match(r"[A-Z_]+=", found[0]):
                found = found[1:]
            yield (found[0].removeprefix("DIR/bin/"), *found[1:])
            found = []


COMMANDS = [command for name in PAGES for command in commands_of(name)]
PYTHON_EXAMPLES = {text for _, language, text in fences() if language == "python" and "OpenAI" not in text}


def settings_of(program: str) -> type[Settings] | None:
    """Return the settings of a program or command of ours; None if it has an argument parser instead."""
    if program in SETTINGS:
        module, _, name = SETTINGS[program].rpartition(".")
        settings: type[Settings] = getattr(importlib.import_module(module), name)
        return settings
    return cli.COMMANDS[program.split()[1]][0] if program.startswith("specpool ") else None
