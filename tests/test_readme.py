"""Commands in the README and docs/ work as written, except for the port; the files that the pages name exist."""

import argparse
import asyncio
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import serving

from specpool.cli.main import COMMANDS, known_keys
from specpool.rpc.config.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
EVERYTHING = "\n".join(PAGES.values())
BIN = Path(sys.executable).parent

BUF_COMMANDS = re.findall(r"^    (\.venv/bin/buf curl (?:.*\n)+?.*GenerationService/\w+)$", EVERYTHING, re.MULTILINE)
# Number of samples that end in the output of each method.
ANSWERS = {"Generate": 1, "GenerateStream": 2, "GetModelInfo": 0}
PYTHON_EXAMPLES = {
    example for example in re.findall(r"```python\n(.*?)```", EVERYTHING, re.DOTALL) if "import OpenAI" not in example
}

# Commands whose arguments are settings, and their settings classes; `specpool.cli.main.COMMANDS` has further commands.
SETTINGS = {
    "specpool distill": "specpool.distill.main.DistillSettings",
    "specpool plan": "specpool.planning.main.PlanSettings",
    "specpool-coordinator": "coordinator.config.settings.CoordinatorSettings",
    "specpool-draft-worker": "draft_worker.server.DraftWorkerSettings",
    "specpool-target-worker": "target_worker.server.TargetWorkerSettings",
    "python -m specpool.distill.evaluate": "specpool.distill.evaluate.EvaluateSettings",
}
# Commands of other projects, and those that tests in this file or elsewhere run completely.
NOT_OURS = (
    "pip install ", "cd examples/typescript ", "npm start ", ".venv/bin/buf curl ", "openssl ", "smg launch ", "curl ",
    "helm ", "kubectl ", "prometheus ", "env SPECPOOL_DRAFT_ADDRESS=", "env SPECPOOL_LLAMACPP_PYTHON=",
    "python3 -m venv ",
)  # fmt: skip
TYPED = re.compile(r"(\.venv/bin/)?(specpool(-[a-z]+)*|python -m [\w.]+|make [\w-]+)( |$)")


def commands_of(page: str) -> Iterator[str]:
    """Commands on a page: in fenced or indented blocks, and in code within a line."""
    fences = re.findall(r"^```(?:sh)?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^$\n((?:^    \S.*\n(?:^     .*\n)*)+)", page, re.MULTILINE)
    for block in (*fences, *(re.sub("^    ", "", block, flags=re.MULTILINE) for block in indented)):
        if not re.match(r"\s*[a-z.]", block):  # a diagram
            continue
        whole = re.sub(r"\\?\n\s+", " ", block)  # joins commands of several lines
        yield from (line.partition("  #")[0].partition(" > ")[0].strip() for line in whole.splitlines())
    for code in re.findall(r"`([^`\n]+)`", page):
        if TYPED.match(code) and code.partition(" ")[2]:
            yield re.sub(r"[\[\]]", "", code)  # brackets mark optional arguments


def as_typed(command: str, address: str) -> str:
    return command.replace("127.0.0.1:50050", address).replace(".venv/bin", str(BIN))


async def output_of(*command: str) -> str:
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def method_of(command: str) -> str:
    return command.rpartition("/")[2]


def settings_of(command: str) -> type[Settings] | None:
    if command in SETTINGS:
        module, _, name = SETTINGS[command].rpartition(".")
        kind: type[Settings] = getattr(importlib.import_module(module), name)
        return kind
    return COMMANDS[command.split()[1]][0] if command.startswith("specpool ") else None


ALL_COMMANDS = sorted({command for page in PAGES.values() for command in commands_of(page)})
OUR_COMMANDS = [command for command in ALL_COMMANDS if not command.startswith(NOT_OURS)]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificates that the commands on a page make, and with tokens."""
    folder = tmp_path_factory.mktemp("secrets")
    make_ca, *make_certificate = [c for c in commands_of(PAGES["docs/security.md"]) if " -out " in c]
    others = [c.replace("coordinator", name) for name in ("target", "client") for c in make_certificate]
    for command in (make_ca, *make_certificate, *others):
        subprocess.run(shlex.split(command), cwd=folder, check=True, capture_output=True)
    (folder / "token").write_text("0123456789abcdef")
    (folder / "tokens").write_text("client 0123456789abcdef")
    return folder


def test_there_are_examples_of_the_main_calls() -> None:
    assert set(map(method_of, BUF_COMMANDS)) == set(ANSWERS)
    assert PYTHON_EXAMPLES
    assert {"make demo", "make test", ".venv/bin/specpool up"} <= set(OUR_COMMANDS)


@pytest.mark.parametrize("command", BUF_COMMANDS, ids=method_of)
async def test_buf_curl(command: str) -> None:
    async with serving() as served:
        output = await output_of("bash", "-c", as_typed(command, served.address))
    assert output.count('"finishReason": "length"') == ANSWERS[method_of(command)]


@pytest.mark.parametrize("example", PYTHON_EXAMPLES, ids=len)
async def test_the_python_example(example: str) -> None:
    async with serving() as served:
        output = await output_of(sys.executable, "-c", as_typed(example, served.address))
        assert output
        info = await served.info()
        assert (info.counters.requests, sum(info.counters.finished.values())) == (2, 2)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # a module that another one imports
@pytest.mark.parametrize("command", OUR_COMMANDS)
def test_a_command_takes_these_arguments(command: str, secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(secrets)
    assert TYPED.match(command), f"no command that we know: {command}"
    command = command.removeprefix(".venv/bin/")
    if command.startswith("make "):
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        words = shlex.split(command)[1:]
        assert {word for word in words if "=" not in word} <= set(targets)
        monkeypatch.syspath_prepend(ROOT / "tests/system")
        for name, options in (word.split("=", 1) for word in words if word.startswith(("SOAK=", "ATTACKS="))):
            with pytest.raises(_ParsedError):
                _parse_only(f"lab.{name.lower()}", shlex.split(options), monkeypatch)
        return
    words = shlex.split(command)
    length = {"specpool": 2, "python": 3}.get(words[0], 1)
    program, arguments = " ".join(words[:length]), words[length:]
    if (settings := settings_of(program)) is not None:
        settings.load(program, arguments, neighbours=known_keys())
        return
    with pytest.raises(_ParsedError):
        _parse_only(words[2], arguments, monkeypatch)


class _ParsedError(Exception):
    """A program has parsed its arguments."""


def _parse_only(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a program until it has parsed its arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *given: object) -> None:
        parse(parser, *given)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_and_names_exists(page: str) -> None:
    folder = (ROOT / page).parent
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGES[page])}
    assert {link for link in links if not (folder / link).exists()} == set()
    named = set(re.findall(r"`([\w.]+/(?:[\w./]*(?:/|\.py|\.c|\.md|run))?)`", PAGES[page]))
    inside = {
        "cache/",
        "passes/",
        "models/",
        "weights/",
        "parallel/",
        "probes/",
        "native/",
        "prompts/",
        "scheduling/",
        "drafting/",
        "workers/",
    }
    inside |= {"client/", "cli/", "v1/", "smg/", "telemetry/", "tracing/"}  # named relative to the folder they are in
    assert {path for path in named - inside if not (ROOT / path).exists()} == set()


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", PAGES["README.md"]))
    assert linked == PAGES.keys() - {"README.md"}
