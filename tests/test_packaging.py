"""`pip install` puts exactly our four packages on the import path, with all their modules and data files."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGES = {"specpool", "coordinator", "draft_worker", "target_worker"}


def test_only_four_packages_are_installed() -> None:
    packages = find_packages(str(ROOT), **SETUPTOOLS["packages"]["find"])
    assert {name.partition(".")[0] for name in packages} == PACKAGES


def test_wheel_contains_every_source_folder_and_data_file() -> None:
    packages = set(find_packages(str(ROOT), **SETUPTOOLS["packages"]["find"]))
    files = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.*")]
    files = [path for path in files if "__pycache__" not in path.parts and (ROOT / path).is_file()]
    assert {".".join(path.parent.parts) for path in files} <= packages
    patterns = ["*.py", *SETUPTOOLS["package-data"]["*"]]
    assert [path for path in files if not any(fnmatch(path.name, pattern) for pattern in patterns)] == []
