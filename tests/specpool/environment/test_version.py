"""Specpool knows its version, and starts its processes, from a checkout that is not installed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from specpool.cli.processes import worker_environment
from specpool.environment import process
from specpool.environment.process import package_version, python_path

ROOT = Path(__file__).parents[3]


@pytest.fixture
def _uninstalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    def forget() -> None:
        package_version.cache_clear()
        process._installed_version.cache_clear()

    monkeypatch.setattr(process, "version", missing)
    forget()
    yield
    forget()


@pytest.mark.usefixtures("_uninstalled")
def test_the_version_of_a_checkout_is_that_of_pyproject() -> None:
    assert f'\nversion = "{package_version()}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.usefixtures("_uninstalled")
def test_the_path_of_a_checkout_comes_first() -> None:
    assert python_path({}) == {"PYTHONPATH": str(ROOT)}
    assert python_path({"PYTHONPATH": "bundle"}) == {"PYTHONPATH": f"{ROOT}{os.pathsep}bundle"}


@pytest.mark.usefixtures("_uninstalled")
def test_a_worker_of_a_checkout_finds_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "target_worker.py").write_text("raise SystemExit('not this one')")
    program = "import target_worker; print(target_worker.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", program],  # -S: without installed packages
        cwd=tmp_path, env=worker_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(ROOT / "target_worker" / "__init__.py")
