"""`pip install` puts exactly our four packages on the import path, with all their modules and data files."""

import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGES = {"specpool", "coordinator", "draft_worker", "target_worker"}
LEFT_OUT = {Path("specpool/engine/models/embedded_draft.safetensors")}
"""Files that only a checkout has."""
MAX_WHEEL_BYTES = 1_200_000
NEIGHBOURS = ("rpc", "engine", "worker", "protocol")
"""Other packages with the names of our subpackages."""


def test_only_four_packages_are_installed() -> None:
    packages = find_packages(str(ROOT), **SETUPTOOLS["packages"]["find"])
    assert {name.partition(".")[0] for name in packages} == PACKAGES


def test_wheel_contains_every_source_folder_and_data_file() -> None:
    packages = set(find_packages(str(ROOT), **SETUPTOOLS["packages"]["find"]))
    files = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.*")]
    files = [path for path in files if "__pycache__" not in path.parts and (ROOT / path).is_file()]
    assert {".".join(path.parent.parts) for path in files} <= packages
    patterns = ["*.py", *SETUPTOOLS["package-data"]["*"]]
    assert {path for path in files if not any(fnmatch(path.name, pattern) for pattern in patterns)} == LEFT_OUT


@pytest.mark.slow
def test_the_wheel_coexists_with_packages_of_the_same_names(tmp_path: Path) -> None:
    source, neighbours, site = tmp_path / "source", tmp_path / "neighbours", tmp_path / "site"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for name in NEIGHBOURS:
        (neighbours / name).mkdir(parents=True)
        (neighbours / name / "__init__.py").write_text(f"NAME = '{name}'")
    (neighbours / "pyproject.toml").write_text('[project]\nname = "neighbours"\nversion = "1"\n[tool.setuptools]\n')
    with (neighbours / "pyproject.toml").open("a") as project:
        print(f"packages = {list(NEIGHBOURS)}", file=project)
    pip("wheel", "--wheel-dir", tmp_path, source)
    [wheel] = tmp_path.glob("specpool-*.whl")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    pip("install", "--target", site, wheel, neighbours)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {*PACKAGES, *NEIGHBOURS, "bin"}
    program = f"""
import sys
sys.path.insert(0, {str(site)!r})
import {", ".join(NEIGHBOURS)}
assert [module.NAME for module in ({", ".join(NEIGHBOURS)})] == {list(NEIGHBOURS)}
import coordinator.server, draft_worker.server, specpool.cli.main, target_worker.server
from specpool import Client
with Client("127.0.0.1:50050"):
    pass
for name in {sorted(PACKAGES | {*NEIGHBOURS})}:
    assert sys.modules[name].__file__.startswith({str(site)!r}), name
"""
    subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env={}, check=True)


def pip(command: str, *arguments: str | Path) -> None:
    """Run pip without network access."""
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", command, *offline, *arguments], check=True)


def test_a_script_beside_the_checkout_imports_the_package(tmp_path: Path) -> None:
    """The checkout's folder, often also called `specpool`, must not shadow it. `make` installs it like this."""
    (tmp_path / "specpool").symlink_to(ROOT)
    script = tmp_path / "script.py"
    script.write_text("from specpool import Client")
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True)
