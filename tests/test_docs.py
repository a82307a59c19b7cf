"""README and docs: commands parse, examples run, and links and named paths exist."""

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
from typing import Any

import pytest
from serving import serving

from specpool.cli.main import COMMANDS, known_keys
from specpool.rpc.config.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "deploy/README.md")}
PAGES |= {f"docs/{page.name}": page.read_text() for page in ROOT.glob("docs/*.md")}
TEXT = "\n".join(PAGES.values())
BIN = Path(sys.executable).parent
# Paths on a page are relative to the repository, or to a folder that the page describes.
FOLDERS = [ROOT / folder for folder in ("", "specpool", "specpool/engine", "coordinator")]

BUF_COMMANDS = re.findall(r"^    (\.venv/bin/buf curl (?:.*\n)+?.*GenerationService/\w+)$", TEXT, re.MULTILINE)
SAMPLES = {"Generate": 1, "GenerateStream": 2, "GetModelInfo": 0}  # in the output of each method
PYTHON_EXAMPLES = {
    example for example in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "OpenAI" not in example
}

# Settings of the commands that are not in `specpool.cli.main.COMMANDS`.
SETTINGS = {
    "specpool distill": "specpool.distill.main.DistillSettings",
    "specpool plan": "specpool.planning.main.PlanSettings",
    "specpool-coordinator": "coordinator.config.settings.CoordinatorSettings",
    "specpool-draft-worker": "draft_worker.server.DraftWorkerSettings",
    "specpool-target-worker": "target_worker.server.TargetWorkerSettings",
    "python -m specpool.distill.evaluate": "specpool.distill.evaluate.EvaluateSettings",
}
OURS = re.compile(r"(\.venv/bin/)?(specpool(-[a-z]+)*|python -m [\w.]+|make [\w-]+)( |$)")


def commands_of(page: str) -> Iterator[str]:
    """Yield our commands on a page: in fenced blocks, in indented blocks, and inline."""
    fences = re.findall(r"^```(?:sh)?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^$\n((?:^    \S.*\n(?:^     .*\n)*)+)", page, re.MULTILINE)
    for block in (*fences, *(re.sub("^    ", "", block, flags=re.MULTILINE) for block in indented)):
        for line in re.sub(r"\\?\n\s+", " ", block).splitlines():  # joins continuation lines
            if OURS.match(line):
                yield line.partition("  #")[0].partition(" > ")[0].strip()
    for code in re.findall(r"`([^`\n]+)`", page):
        if OURS.match(code) and " " in code:
            yield re.sub(r"[\[\]]", "", code)  # brackets mark optional arguments


OUR_COMMANDS = sorted({command.removeprefix(".venv/bin/") for page in PAGES.values() for command in commands_of(page)})


async def output_of(address: str, program: str | Path, text: str) -> str:
    typed = text.replace("127.0.0.1:50050", address).replace(".venv/bin", str(BIN))
    command = [program, "-c", typed]
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_examples_of_the_main_calls_run() -> None:
    methods = [command.rpartition("/")[2] for command in BUF_COMMANDS]
    assert set(methods) == SAMPLES.keys()
    assert PYTHON_EXAMPLES
    async with serving() as served:
        for command, method in zip(BUF_COMMANDS, methods, strict=True):
            output = await output_of(served.address, "bash", command)
            assert output.count('"finishReason": "length"') == SAMPLES[method]
        for example in PYTHON_EXAMPLES:
            assert await output_of(served.address, sys.executable, example)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificates that docs/security.md creates, and with tokens."""
    folder = tmp_path_factory.mktemp("secrets")
    openssl = re.findall(r"^    (openssl (?:.*\\\n)*.*)$", PAGES["docs/security.md"], re.MULTILINE)
    make_ca, *make_certificate = [command.replace("\\\n", " ") for command in openssl]
    others = [command.replace("coordinator", name) for name in ("target", "client") for command in make_certificate]
    for command in (make_ca, *make_certificate, *others):
        subprocess.run(shlex.split(command), cwd=folder, check=True, capture_output=True)
    (folder / "token").write_text("0123456789abcdef")
    (folder / "tokens").write_text("client 0123456789abcdef")
    return folder


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # a module that another one imports
@pytest.mark.parametrize("command", OUR_COMMANDS)
def test_commands_accept_the_documented_arguments(command: str, secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(secrets)
    words = shlex.split(command)
    length = {"specpool": 2, "python": 3}.get(words[0], 1)
    program, arguments = " ".join(words[:length]), words[length:]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets)
        monkeypatch.syspath_prepend(ROOT / "tests/system")
        for name, options in (word.split("=", 1) for word in arguments if "=" in word):
            if (ROOT / f"tests/system/lab/{name.lower()}.py").exists():  # SOAK and ATTACKS
                parse_only(f"lab.{name.lower()}", shlex.split(options), monkeypatch)
    elif (settings := settings_of(program)) is not None:
        settings.load(program, arguments, other_settings=known_keys())
    else:
        parse_only(words[2], arguments, monkeypatch)


def settings_of(program: str) -> type[Settings] | None:
    if program in SETTINGS:
        module, _, name = SETTINGS[program].rpartition(".")
        settings: type[Settings] = getattr(importlib.import_module(module), name)
        return settings
    return COMMANDS[program.split()[1]][0] if program.startswith("specpool ") else None


def parse_only(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a module until it has parsed its arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *given: Any) -> None:
        parse(parser, *given)
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(InterruptedError):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def anchors_of(page: Path) -> set[str]:
    """Return GitHub's anchors for the headings of a page, and the empty anchor for its top."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE) if page.suffix == ".md" else []
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings} | {""}


@pytest.mark.parametrize("name", PAGES)
def test_links_and_named_paths_exist(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[name]):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert anchor in anchors_of(target), link
    named = set(re.findall(r"`([\w.]+/(?:[\w./]*(?:/|\.py|\.c|\.md|run))?)`", PAGES[name]))
    assert {path for path in named if not any((folder / path).exists() for folder in FOLDERS)} == set()


def test_every_section_of_the_record_has_a_date() -> None:
    _, *sections = re.split(r"^## ", PAGES["docs/benchmarks.md"], flags=re.MULTILINE)
    begins = [section.partition("\n\n")[2] for section in sections]
    dated = re.compile(r"<!-- figures: measured -->|\*Measured on 20\d\d-\d\d-\d\d|\*Nothing was measured")
    assert [
        section.partition("\n")[0] for section, text in zip(sections, begins, strict=True) if not dated.match(text)
    ] == []


def test_named_flags_exist() -> None:
    foreign_flags = {"help", "api-key", "max-loras", "speculative-config", "trust-remote-code"}
    classes = [settings for settings, *_ in COMMANDS.values() if settings] + [settings_of(name) for name in SETTINGS]
    known = {*known_keys(), *(field for settings in classes if settings for field in settings.model_fields)}
    for page in PAGES.keys() - {"docs/benchmarks.md", "docs/smg.md", "deploy/README.md"}:  # flags of other programs
        flags = set(re.findall(r"`--([a-z][a-z-]+)", PAGES[page])) - foreign_flags
        assert {flag for flag in flags if not {flag.replace("-", "_"), flag[3:].replace("-", "_")} & known} == set()


def test_readme_links_every_page_and_has_the_two_commands() -> None:
    assert set(re.findall(r"\]\((docs/\w+\.md)\)", PAGES["README.md"])) == PAGES.keys() - {
        "README.md",
        "deploy/README.md",
    }
    assert {"make demo", "make test", "specpool up"} <= set(commands_of(PAGES["README.md"])) | set(OUR_COMMANDS)
    assert len(PAGES["README.md"].splitlines()) <= 150
