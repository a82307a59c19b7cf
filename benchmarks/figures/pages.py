"""Figures on the pages: marked blocks and others, and the commands behind the results."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.llamacpp_process import PYTHON_VARIABLE
from benchmarks.report import describe_run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks/results"
THROUGHPUT = "python -m benchmarks.throughput --concurrencies 1,4,8,16 --kinds best,adaptive --max-tokens 96"
COMMANDS = {
    "demo": "specpool demo --repeats 3",
    "demo_1": "specpool demo --repeats 3 --num-prompts 8 --concurrency 1",
    "demo_8": "specpool demo --repeats 3 --concurrency 8",
    "equality": "python -m benchmarks.equality",
    "default": f"{THROUGHPUT} --repeats 3",
    "llamacpp": "python -m benchmarks.llamacpp --concurrency 1,8,16 --repeats 3",
    "sustained": "python -m benchmarks.sustained --seconds 60 --plain --llamacpp",
    "start_first": "python -m benchmarks.cost --of start --bare --repeats 1",
    "start": "python -m benchmarks.cost --of start --repeats 3",
    "coordinator": "python -m benchmarks.cost --of coordinator",
    "monitoring": "python -m benchmarks.monitoring",
}
"""Commands of the results that pages show now. Each one prints its result as a last line of JSON."""
WITH_JSON = ("demo", "demo_1", "demo_8")
"""Commands that print JSON only with `--json`."""
WITH_LLAMACPP = ("llamacpp", "sustained")
Results = dict[str, dict[str, Any]]

BLOCK = re.compile(r"(<!-- figures: ([a-z_]+) -->)(.*?)(<!-- /figures -->)", re.DOTALL)
UNMEASURED = re.compile(r"```.*?```|`[^`\n]*`|<!-- estimates -->.*?<!-- /estimates -->", re.DOTALL)
"""Text whose figures are no results: code, and marked estimates."""
FIGURE = re.compile(r"\d(?:[\d.,]*\d)?(?: tokens/s|x\b| ms\b)")
RECORDS = ("docs/benchmarks.md", "docs/decisions.md", "docs/kernels.md")
"""Pages of dated measurements, which may show figures outside blocks."""
Texts = Mapping[str, Callable[[Results], str]]


def load() -> Results:
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def measure(name: str) -> None:
    """Run a command and save its result. CalledProcessError: it failed; its errors are on stderr."""
    run = describe_run(COMMANDS[name])
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environment = {**os.environ, "PATH": path}
    if name not in WITH_LLAMACPP:
        environment.pop(PYTHON_VARIABLE, None)  # the service refuses unknown variables
    command = shlex.split(COMMANDS[name]) + ["--json"] * (name in WITH_JSON)
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    (FOLDER / f"{name}.json").write_text(json.dumps({**result, "run": run}, indent=1) + "\n")


def pages(root: Path) -> list[Path]:
    """The README and all pages of the docs."""
    return [root / "README.md", root / "deploy/README.md", *sorted(root.glob("docs/*.md"))]


def filled(page: str, texts: Texts, results: Results) -> str:
    """The page with the current figures. KeyError: an unknown block or result."""

    def block(match: re.Match[str]) -> str:
        begin, name, old, end = match.groups()
        text = texts[name](results)
        return f"{begin}\n{text}\n{end}" if old.startswith("\n") else f"{begin}{text}{end}"

    return BLOCK.sub(block, page)


def differences(page: str, expected: str) -> Iterator[str]:
    """A message, beginning with the line, for each line that differs. Both pages have the same blocks."""
    for old, new in zip(BLOCK.finditer(page), BLOCK.finditer(expected), strict=True):
        line = page.count("\n", 0, old.start()) + 1
        shown, current = old[3].split("\n"), new[3].split("\n")
        for number in range(max(len(shown), len(current))):
            have, want = (dict(enumerate(lines)).get(number, "") for lines in (shown, current))
            if have != want:
                yield f"{line + number}: {old[2]}: {have!r}, but the results say {want!r}"


def stray_figures(page: str) -> Iterator[str]:
    """A message, beginning with the line, for each figure outside blocks, code and estimates."""
    rest = page
    for pattern in (BLOCK, UNMEASURED):
        rest = pattern.sub(lambda match: "\n" * match[0].count("\n"), rest)
    for number, line in enumerate(rest.split("\n"), 1):
        if not line.startswith("    "):  # an indented block of code
            yield from (f"{number}: a figure outside a block: {figure}" for figure in FIGURE.findall(line))
