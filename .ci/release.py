"""Build and test everything that a release publishes: `make release-check`.

Writes build/release: the wheel, its SBOM, the chart's archive and SHA256SUMS. Builds from the last commit and ignores
uncommitted changes. Without a Docker daemon, only resolves the requirements of the coordinator's image for its Python.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import yaml
from deployment import arguments_of
from helm_chart import helm

from specpool.rpc.ports import free_port

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "build/release"
CYCLONEDX = ROOT / ".venv/tools/bin/cyclonedx-py"
PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def run(*command: str | Path, **options: object) -> str:
    """Run a command and return its output. Exit with the output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"release: {shlex.join(map(str, command))} ended with status {done.returncode}:\n{done.stdout}")
    return str(done.stdout)


def check_versions(source: Path) -> str:
    chart = yaml.safe_load((source / "deploy/helm/specpool/Chart.yaml").read_text())
    if not chart["version"] == chart["appVersion"] == VERSION:
        sys.exit(
            f"release: pyproject.toml has version {VERSION}; Chart.yaml {chart['version']} and {chart['appVersion']}"
        )
    if f"\n## {VERSION}" not in (source / "docs/changelog.md").read_text():
        sys.exit(f"release: docs/changelog.md has no section {VERSION}")
    return f"{VERSION} in pyproject.toml, Chart.yaml and the changelog"


def build_wheel(source: Path) -> str:
    epoch = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    digests = set()
    for _ in range(2):
        shutil.rmtree(source / "build", ignore_errors=True)
        command = [
            sys.executable,
            *shlex.split("-m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir"),
            OUTPUT,
        ]
        run(*command, source, env=os.environ | {"SOURCE_DATE_EPOCH": epoch})
        digests.add(digest(wheel()))
    if len(digests) > 1:
        sys.exit("release: two builds of the wheel differ")
    return f"{wheel().name}, twice with the same bytes"


def try_wheel(scratch: Path) -> str:
    """Install the wheel in a new environment, serve the default model, and generate an answer."""
    new_environment(scratch, "worker,smg")
    program = scratch / "bin/specpool"
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]:
        run(scratch / "bin" / name, "--help", cwd=scratch)
    port = str(free_port())
    command = [program, "up", "--draft", "none", "--http-port", "0", "--port", port]
    with (
        (scratch / "up.log").open("w") as log,
        subprocess.Popen(command, cwd=scratch, stdout=log, stderr=log) as service,
    ):
        try:
            limits = shlex.split("--wait-seconds 120 --max-tokens 8")
            run(program, "generate", "--address", f"127.0.0.1:{port}", *limits, "Once", cwd=scratch)
        finally:
            service.terminate()
    return "installed in a new environment; served and answered"


def new_environment(folder: Path, extras: str) -> None:
    """Install the wheel with pinned dependencies, as in the Makefile: torch first, as the CPU build if pip finds it."""
    run(sys.executable, "-m", "venv", folder)
    pip = [folder / "bin/pip", "install", "--quiet"]
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = re.search(r"^pip==(?:.*\\\n)*.*$", constraints, re.MULTILINE)
    assert pinned is not None
    (folder / "pip.txt").write_text(pinned[0])
    run(*pip, "--require-hashes", "--requirement", folder / "pip.txt")
    torch = re.findall(r"^torch==\S+", constraints, re.MULTILINE)[0]
    pinned_pip = [*pip, "--constraint", ROOT / "constraints.txt"]
    if subprocess.run([*pinned_pip, f"{torch}+cpu"], capture_output=True, check=False).returncode:
        run(*pinned_pip, torch)
    run(*pip, "--no-deps", wheel())
    run(*pinned_pip, f"specpool[{extras}]")


def list_packages(scratch: Path) -> str:
    path = OUTPUT / f"specpool-{VERSION}.cdx.json"
    run(CYCLONEDX, "environment", "--output-reproducible", "--output-file", path, scratch / "bin/python")
    return path.name


def check_images(source: Path) -> str:
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        for target in ("coordinator", "worker"):
            run("docker", "buildx", "build", "--file", source / "deploy/Dockerfile", "--target", target, source)
        return "both built by Docker"
    _, *arguments = shlex.split(arguments_of("requirements", "RUN")[-1])
    run(sys.executable, *arguments, cwd=source)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, *shlex.split("-m pip install --quiet --dry-run --ignore-installed --only-binary :all:")]
    command += ["--target", source / "site", "--python-version", "3.12", "--implementation", "cp", *platforms]
    run(*command, "-c", "constraints.txt", "-r", "base.txt", "-r", "coordinator.txt", cwd=source)
    return "requirements of the coordinator's image resolved; `make test-images` builds both without Docker"


def package_chart(source: Path) -> str:
    chart = source / "deploy/helm/specpool"
    run(helm(), "lint", "--strict", chart)
    run(helm(), "package", chart, "--destination", OUTPUT)
    archive = OUTPUT / f"specpool-{VERSION}.tgz"
    run(helm(), "template", "specpool", archive)
    return archive.name


def write_checksums() -> str:
    files = sorted(path for path in OUTPUT.iterdir() if path.is_file())
    (OUTPUT / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in files))
    return f"of {len(files)} files"


def wheel() -> Path:
    return next(OUTPUT.glob("*.whl"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        source, environment = Path(folder) / "source", Path(folder) / "environment"
        source.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
        steps: dict[str, Callable[[], str]] = {
            "version": lambda: check_versions(source),
            "wheel": lambda: build_wheel(source),
            "installation": lambda: try_wheel(environment),
            "SBOM": lambda: list_packages(environment),
            "images": lambda: check_images(source),
            "chart": lambda: package_chart(source),
            "checksums": write_checksums,
        }
        for name, step in steps.items():
            print(f"{name:<13}", end="", flush=True)
            print(step())


if __name__ == "__main__":
    main()
