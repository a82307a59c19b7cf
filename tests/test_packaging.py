"""`pip install` puts only our four packages on the import path, and their data files into the wheel."""

import tomllib
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[1]
FIND = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]


def test_only_four_packages_are_installed() -> None:
    packages = find_packages(str(ROOT), **FIND)
    assert {name.partition(".")[0] for name in packages} == {"specpool", "coordinator", "draft_worker", "target_worker"}


def test_every_source_folder_is_a_package() -> None:
    packages = set(find_packages(str(ROOT), **FIND))
    for top in ("specpool", "coordinator", "draft_worker", "target_worker"):
        folders = {path.parent.relative_to(ROOT) for path in (ROOT / top).rglob("*.py")}
        assert {".".join(folder.parts) for folder in folders} <= packages
