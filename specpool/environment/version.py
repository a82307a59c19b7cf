"""The version of this package, and the import path of its processes, with or without an installation."""

import os
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache  # the lookup reads package metadata from disk
def package_version() -> str:
    """Return the version of Specpool: the installed one, or the checkout's. Raises OSError if there is neither."""
    return _installed_version() or str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that lets a process import an uninstalled checkout; {} if Specpool is installed.

    `environment`: the other variables of the process.
    """
    if _installed_version() is not None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))}


@cache
def _installed_version() -> str | None:
    try:
        return version("specpool")
    except PackageNotFoundError:
        return None
