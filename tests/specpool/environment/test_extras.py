"""The extras of pyproject.toml, and what an installation without them says."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from specpool.environment import extras
from specpool.environment.extras import INCLUDED, MODULES, install_command, installed_from

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALL_MODULES = sorted({module for modules in MODULES.values() for module in modules})


@pytest.mark.parametrize("extra", MODULES)
def test_every_requirement_of_an_extra_has_a_module(extra: str) -> None:
    requirements = PROJECT["optional-dependencies"][extra]
    included = [match[1] for line in requirements if (match := re.fullmatch(r"specpool\[(.+)\]", line))]
    assert included == {"worker": ["coordinator,http"]}.get(extra, [INCLUDED[extra]] if extra in INCLUDED else [])
    assert len(MODULES[extra]) == len(requirements) - len(included)
    assert extras.missing_modules(extra) == []


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        (program, missing)
        for program in PROJECT["scripts"]
        for missing in (["grpc_health", "pydantic_settings"], ALL_MODULES)
    ],
)
def test_commands_name_missing_packages_in_one_line(program: str, missing: list[str], tmp_path: Path) -> None:
    needs_torch = program.endswith("worker")
    arguments = ["--model", str(tmp_path)] if needs_torch else ["up"] if program == "specpool" else []
    done = run_without(missing, program, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    name = " ".join([program, *arguments[:1]]) if program == "specpool" else program
    extra = {"specpool-coordinator": "coordinator", "specpool-openai": "http"}.get(program, "worker")
    assert re.fullmatch(rf"{name}: needs \w+.*: {re.escape(install_command(extra))}\n", done.stderr)


def test_client_commands_need_only_their_extra() -> None:
    others = sorted({*ALL_MODULES} - {*MODULES["cli"]})
    assert run_without(others, "specpool", "generate", "--help").returncode == 0
    done = run_without(ALL_MODULES, "specpool", "top")
    assert (
        done.stderr == f"specpool top: needs grpc_health, platformdirs, pydantic and 2 more: {install_command('cli')}\n"
    )


def run_without(missing: list[str], program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package in a process that cannot import these modules."""
    module, _, function = PROJECT["scripts"][program].partition(":")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); from {module} import {function} as run; run()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("name", "record", "command"),
    [
        ("a checkout", {"dir_info": {}}, "install '{path}[otel]'"),
        ("a checkout", {"dir_info": {"editable": True}}, "install --editable '{path}[otel]'"),
        ("a-0.1.0-py3-none-any.whl", {"archive_info": {}}, "install '{path}[otel]'"),
        ("gone.whl", {"archive_info": {}}, "install '.[otel]' in a checkout of Specpool"),
    ],
)
def test_install_command_names_what_was_installed(
    name: str, record: dict[str, object], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    if name != "gone.whl":
        path.mkdir()
    monkeypatch.setattr(extras, "distribution", lambda _: Recorded({"url": path.as_uri(), **record}))
    assert install_command("otel").endswith(command.format(path=path))


@pytest.mark.parametrize("record", [None, {}, {"url": "https://example.org/specpool.whl"}])
def test_other_sources_are_unknown(record: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "distribution", lambda _: Recorded(record))
    assert installed_from() is None


class Recorded:
    """An installed distribution with this `direct_url.json`."""

    def __init__(self, record: dict[str, object] | None) -> None:
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._record is None else json.dumps(self._record)


def test_workers_need_no_triton() -> None:
    """Torch's CPU builds come without it."""
    modules = "draft_worker.server, target_worker.server, specpool.engine.passes.gpu.model"
    script = f"import sys; sys.modules['triton'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
