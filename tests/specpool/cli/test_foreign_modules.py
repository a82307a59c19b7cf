"""Commands run in any directory, and import nothing from it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specpool.cli.main import run
from specpool.cli.processes import run_module, start_module

ROOT = Path(__file__).parents[3]
MODULES = ("grpc", "coordinator", "rpc", "engine", "specpool", "json")
SPECPOOL = Path(sys.executable).with_name("specpool")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory with modules of our names, which say so when they are imported."""
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(f"import sys\nsys.exit('imported {name} of the current directory')\n")
    return tmp_path


def output(command: list[str], directory: Path) -> str:
    """What a command prints; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_processes_that_we_start_import_nothing_from_the_current_directory(hostile: Path) -> None:
    assert "usage" in output([*run_module("coordinator.server"), "--help"], hostile)


@pytest.mark.skipif(not SPECPOOL.exists(), reason="the command is not installed")
def test_the_command_imports_nothing_from_the_current_directory(hostile: Path) -> None:
    assert "usage" in output([str(SPECPOOL), "up", "--help"], hostile)


async def test_all_processes_are_started_in_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    async def start(*command: str, **_: object) -> None:
        started.append(list(command))

    monkeypatch.setattr("asyncio.create_subprocess_exec", start)
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command))
    await start_module("coordinator.server", "--port", "1")
    run("plan", ["--help"])
    assert started == [
        [*run_module("coordinator.server"), "--port", "1"],
        [*run_module("specpool.planning.main"), "--help"],
    ]
