"""constraints.txt pins every requirement with hashes, and pip rejects files with other hashes."""

import hashlib
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from deployment import ROOT, project
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specpool.engine.models import embedded_pair

CONSTRAINTS = (ROOT / "constraints.txt").read_text()
TORCH_CPU = (ROOT / ".ci/torch-cpu.sha256").read_text()
PIN = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^ ;]+)( ; .+?)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n")
with_cpu_wheels = runpy.run_path(str(ROOT / ".ci/pin.py"))["with_cpu_wheels"]


def make_wheel(folder: Path, name: str, version: str) -> Path:
    """Write a wheel that contains nothing but its metadata."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_every_requirement_has_a_pinned_version_with_hashes() -> None:
    pins = "".join(line for line in CONSTRAINTS.splitlines(keepends=True) if not line.startswith("#"))
    assert PIN.sub("", pins) == ""
    versions = [(canonicalize_name(pin["name"]), pin["version"]) for pin in PIN.finditer(CONSTRAINTS)]
    metadata = project()["project"]
    groups = (metadata["dependencies"], *metadata["optional-dependencies"].values())
    for requirement in (Requirement(line) for group in groups for line in group):
        name = canonicalize_name(requirement.name)
        if name == metadata["name"]:  # an extra that includes another one
            continue
        assert any(pinned == name and requirement.specifier.contains(version) for pinned, version in versions), name


def test_constraints_include_hashes_of_torch_cpu_wheels() -> None:
    assert TORCH_CPU.splitlines()
    assert with_cpu_wheels(CONSTRAINTS, TORCH_CPU) == CONSTRAINTS
    with pytest.raises(SystemExit, match="not the wheels of the pinned torch"):
        with_cpu_wheels(CONSTRAINTS, TORCH_CPU.replace("torch-", "torch-1"))


@pytest.mark.parametrize("genuine", [True, False])
def test_pip_installs_only_files_with_the_pinned_hash(tmp_path: Path, genuine: bool) -> None:
    wheel = make_wheel(tmp_path, "probe", "1.0").read_bytes()
    content = wheel if genuine else b"another file"
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"probe==1.0 \\\n    --hash=sha256:{hashlib.sha256(content).hexdigest()}\n")
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--no-index", "--find-links", tmp_path]
    install = [*pip, "--target", tmp_path / "target", "--constraint", constraints, "probe"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == genuine, f"needs the pip that `make` installs: {done.stderr}"
    assert genuine or "DO NOT MATCH THE HASHES" in done.stderr


def test_embedded_pair_rejects_a_file_with_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, version = embedded_pair.PACKAGE.split("==")
    make_wheel(tmp_path, name.replace("-", "_"), version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OSError, match="DO NOT MATCH THE HASHES"):
        embedded_pair.embedded_pair(tmp_path / "cache")
