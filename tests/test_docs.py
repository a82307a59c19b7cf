"""README and docs: examples run, and links, named paths and flags exist."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import COMMANDS, PAGES, PYTHON_EXAMPLES, ROOT, SETTINGS, settings_of
from serving import serving

from specpool.cli import main as cli

BIN = Path(sys.executable).parent
# Paths on a page are relative to the repository, or to a folder that the page describes.
FOLDERS = [ROOT / folder for folder in ("", "specpool", "specpool/engine", "coordinator")]

BUF_COMMANDS = [command.text for command in COMMANDS if command.program == "buf"]
SAMPLES = {"Generate": 1, "GenerateStream": 2, "GetModelInfo": 0}  # in the output of each method


async def output_of(address: str, program: str | Path, text: str) -> str:
    command = [program, "-c", text.replace("127.0.0.1:50050", address)]
    environment = {**os.environ, "PATH": os.pathsep.join((str(BIN), os.environ["PATH"]))}
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
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
    classes = [settings for settings, *_ in cli.COMMANDS.values() if settings] + list(map(settings_of, SETTINGS))
    known = {*cli.known_keys(), *(field for settings in classes if settings for field in settings.model_fields)}
    for page in PAGES.keys() - {"docs/benchmarks.md", "docs/smg.md", "deploy/README.md", "docs/reference.md"}:
        flags = set(re.findall(r"`--([a-z][a-z-]+)", PAGES[page])) - foreign_flags
        assert {flag for flag in flags if not {flag.replace("-", "_"), flag[3:].replace("-", "_")} & known} == set()


def test_readme_links_every_page_and_has_the_two_commands() -> None:
    assert set(re.findall(r"\]\((docs/\w+\.md)\)", PAGES["README.md"])) == PAGES.keys() - {
        "README.md",
        "deploy/README.md",
    }
    assert {"make demo", "make test", "specpool up"} <= {
        " ".join(one.words) for one in COMMANDS if one.page == "README.md"
    }
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_the_command_reference_is_up_to_date(tmp_path: Path) -> None:
    page = tmp_path / "reference.md"
    subprocess.run([sys.executable, ".ci/generate_reference.py", page], cwd=ROOT, check=True)
    assert page.read_text() == PAGES["docs/reference.md"], "run `make reference`"


def test_users_read_at_most_13500_words() -> None:
    """Reference pages, code and tables of figures do not count."""
    others = {"benchmarks", "decisions", "development", "faults", "kernels", "metrics", "reference"}
    pages = [page for name, page in PAGES.items() if Path(name).stem not in others]
    prose = re.sub(r"(?ms)^```.*?^```|^<!-- figures.*?^<!-- /figures -->|^    .*?$|\]\([^)]*\)", "", "\n".join(pages))
    assert len(re.findall(r"\S*\w\S*", prose)) <= 13_500
