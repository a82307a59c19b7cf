"""The release workflow: valid, with pinned actions and few permissions. `make release-check` runs its build."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import DEPLOY, ROOT, project

WORKFLOW = ROOT / ".github/workflows/release.yaml"
JOBS: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]


def test_the_workflow_is_valid() -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_actions_are_pinned_and_only_the_publishing_job_may_write() -> None:
    actions = re.findall(r"uses: (.+)", WORKFLOW.read_text())
    assert actions
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action) for action in actions)
    assert yaml.safe_load(WORKFLOW.read_text())["permissions"] == {"contents": "read"}
    assert [name for name, job in JOBS.items() if "permissions" in job] == ["publish"]
    assert JOBS["publish"]["needs"] == "check"
    assert "make release-check" in [step.get("run") for step in JOBS["publish"]["steps"]]


def test_versions_agree() -> None:
    version = project()["project"]["version"]
    chart = yaml.safe_load((DEPLOY / "helm/specpool/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert f"\n## {version}" in (ROOT / "docs/changelog.md").read_text()


def test_a_failing_push_ends_the_job(tmp_path: Path) -> None:
    """Steps run as GitHub runs `shell: bash`, so that `tee` does not hide the status of `helm push`."""
    assert yaml.safe_load(WORKFLOW.read_text())["defaults"]["run"]["shell"] == "bash"
    [script] = [step["run"] for step in JOBS["publish"]["steps"] if "helm push" in step.get("run", "")]
    (tmp_path / "build").mkdir()
    for name, line in (("helm", "exit 1"), ("cosign", f"touch {tmp_path}/signed")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REGISTRY": "ghcr.io/Owner", "GITHUB_REF_NAME": "v0.1.0"}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode != 0
    assert not (tmp_path / "signed").exists()


def test_without_docker_the_check_lists_the_requirements_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = runpy.run_path(str(ROOT / ".ci/release.py"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    run, check = release["run"], release["check_images"]
    monkeypatch.setitem(
        check.__globals__, "run", lambda *command, **options: "pip" in command or run(*command, **options)
    )
    assert "resolved" in check(tmp_path)
    assert "starlette" in (tmp_path / "base.txt").read_text()


def test_the_wheel_is_tried_with_the_torch_that_pip_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = runpy.run_path(str(ROOT / ".ci/release.py"))
    installed: list[str] = []

    def install(command: list[object], **_: object) -> subprocess.CompletedProcess[str]:
        """Fail for torch's CPU build, which PyPI lacks."""
        installed.append(str(command[-1]))
        return subprocess.CompletedProcess(command, int(installed[-1].endswith("+cpu")), stdout="")

    monkeypatch.setattr(subprocess, "run", install)
    new_environment = release["new_environment"]
    monkeypatch.setitem(new_environment.__globals__, "wheel", lambda: tmp_path / "specpool.whl")
    new_environment(tmp_path, "worker")
    torch = next(each for each in installed if each.startswith("torch=="))
    assert installed[-4:] == [torch, torch.removesuffix("+cpu"), str(tmp_path / "specpool.whl"), "specpool[worker]"]
