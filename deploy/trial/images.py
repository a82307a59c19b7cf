"""Builds both images by the steps of deploy/Dockerfile and runs all processes from them, without a Docker daemon.

`python -m deploy.trial.images` as root, with Debian's podman, buildah, runc and mmdebstrap, and a Python 3.12 that was
built from source (`--python PREFIX`). Where Docker Hub cannot be reached, there is no base image: the same release of
Debian, with that Python in /usr/local, takes its place. All else is the Dockerfile's: its steps, users and settings,
and the real packages. Containers run as pods do: user 10001, a read-only root, no capabilities, seccomp, /tmp in
memory; but they share the host's network. The models are a tiny random pair, on the CPU.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.trial.containers import ROOT, Images, run

SERVING_SECONDS = 120
TOOLS = ("podman", "buildah", "runc", "mmdebstrap")
COORDINATOR, DRAFT, TARGET = "coordinator", "draft-worker", "target-worker"
USER = 10001
CONTENT = {"base", "pair", "pip.conf", "run", "storage"}
"""Names in the folder of the storage."""
PACKAGES = "usr/local/lib/python3.12/site-packages/"
GENERATE = "specpool generate --address 127.0.0.1:{port} --max-tokens 48 --json Hello"
MAKE_PAIR = "from pathlib import Path; from benchmarks.tiny_pair import make_tiny_pair; make_tiny_pair(Path('/pair'))"
ASK = "from specpool import Client; print(Client('127.0.0.1:{port}').model_info())"


def require(true: bool, what: str) -> None:
    """Prints that something holds, or ends the script if it does not."""
    if not true:
        sys.exit(f"images: FAILED: {what}")
    print(f"ok: {what}", file=sys.stderr, flush=True)


def check_content(images: Images) -> dict[str, object]:
    """Checks what is in both images, and what must not be; returns their sizes."""
    sizes: dict[str, object] = {"base_mib": images.content_mib("base")}
    for image in ("coordinator", "worker"):
        sizes[f"{image}_mib"] = images.content_mib(image)
        sizes[f"{image}_torch_mib"] = images.content_mib(
            image, *(PACKAGES + name for name in ("torch", "nvidia", "triton"))
        )
        user = images.inside(image, "id", "-u").strip()
        require(user == str(USER), f"{image} runs as user {user}")
        freeze = images.inside(image, "python", "-m", "pip", "freeze", "--all")
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / f"build/{image}.txt").write_text(freeze)
        sizes[f"{image}_packages"] = len(freeze.splitlines())
        extras = images.inside(image, "python", "-c", "import opentelemetry.sdk, prometheus_client; print('yes')")
        require(extras.strip() == "yes", f"{image} can serve metrics and send traces")
        write_sbom(image)
    find = "import importlib.util as u, shutil; print(u.find_spec('torch') is not None, shutil.which('cc') is not None)"
    require(images.inside("coordinator", "python", "-c", find).split() == ["False"] * 2, "coordinator: no torch, no cc")
    require(images.inside("worker", "python", "-c", find).split() == ["True"] * 2, "worker: torch and cc")
    return sizes


def write_sbom(image: str) -> None:
    """build/sbom-IMAGE.json (CycloneDX), from the packages in the image; needs the tools of `make sbom`."""
    tool = ROOT / ".venv/tools/bin/cyclonedx-py"
    if not tool.exists():
        return print("no .venv/tools (`make sbom`): no SBOM of the images", file=sys.stderr)
    run(str(tool), "requirements", "--output-reproducible", "-o", f"build/sbom-{image}.json", f"build/{image}.txt")
    components = json.loads((ROOT / f"build/sbom-{image}.json").read_text())["components"]
    require(len(components) > 40, f"build/sbom-{image}.json lists {len(components)} packages")
    return None


@contextmanager
def service(images: Images) -> Iterator[int]:
    """Runs the three processes; yields the coordinator's port. At the end all must exit on SIGTERM."""
    ports = free_ports(6)
    target, draft, coordinator, *health = ports
    common = {
        "SPECPOOL_DEVICE": "cpu",
        "SPECPOOL_THREADS": "1",
        "SPECPOOL_MAX_SEQUENCES": "4",
        "SPECPOOL_HOST": "127.0.0.1",
    }
    workers = ((TARGET, "target", target, health[0]), (DRAFT, "draft", draft, health[1]))
    try:
        for name, model, port, check in workers:
            settings = {**common, "SPECPOOL_MODEL": f"/pair/{model}", "SPECPOOL_PORT": str(port)}
            images.start(name, "worker", f"specpool-{name}", SPECPOOL_HEALTH_PORT=str(check), **settings)
        images.start(
            COORDINATOR, "coordinator", SPECPOOL_HOST="127.0.0.1", SPECPOOL_PORT=str(coordinator),
            SPECPOOL_HEALTH_PORT=str(health[2]), SPECPOOL_TARGET_ADDRESS=f"127.0.0.1:{target}",
            SPECPOOL_DRAFT_ADDRESS=f"127.0.0.1:{draft}",
        )  # fmt: skip
        for name, port in zip((TARGET, DRAFT, COORDINATOR), health, strict=True):
            wait_serving(images, name, port)
        yield coordinator
        for name in (COORDINATOR, DRAFT, TARGET):
            images.podman("stop", "--time", "45", name)
            status = images.podman("inspect", "--format", "{{.State.ExitCode}}", name, quiet=True).strip()
            require(status == "0", f"{name} ends on SIGTERM with status {status}")
    finally:
        for name in (COORDINATOR, DRAFT, TARGET):
            images.podman("rm", "--force", "--ignore", name, quiet=True)


def wait_serving(images: Images, name: str, port: int) -> None:
    """Waits until the health check of the image says that the process serves."""
    check = [
        "exec",
        name,
        "sh",
        "-c",
        f"python -m specpool.healthcheck 127.0.0.1:{port} && echo serving || true",
    ]
    state = ["container", "inspect", "--format", "{{.State.Running}}", name]
    deadline = time.monotonic() + SERVING_SECONDS
    while True:
        if images.podman(*state, quiet=True).strip() == "false" or time.monotonic() > deadline:
            sys.exit(f"images: {name} does not serve:\n{images.podman('logs', name, stderr=subprocess.STDOUT)}")
        if "serving" in images.podman(*check, quiet=True, stderr=subprocess.DEVNULL):
            return require(True, f"{name} serves, as its health check says")
        time.sleep(0.5)


def free_ports(count: int) -> list[int]:
    """Free ports of the loopback interface."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def check_service(images: Images) -> None:
    """Generates with and without speculation, from within the coordinator's container."""
    with service(images) as port:
        said = images.podman("exec", COORDINATOR, "python", "-c", ASK.format(port=port), quiet=True)
        require("EQUIVALENCE_BITWISE" in said, "the target proves that its tokens are exact")
        require("runs slowly" not in said, "the target compiled its pass on the read-only root")
        command = GENERATE.format(port=port).split()
        speculative, plain = (
            json.loads(images.podman("exec", COORDINATOR, *command, f"--num-speculative-tokens={k}")) for k in (3, 0)
        )
        drafted = int(speculative["speculative_decoding"]["num_draft_tokens"])
        require(drafted > 0, f"{drafted} tokens were drafted")
        require(speculative["token_ids"] == plain["token_ids"], f"{len(plain['token_ids'])} tokens are those of k = 0")
        writes = images.podman("exec", COORDINATOR, "sh", "-c", "touch /probe 2>&1 || true", quiet=True)
        require("Read-only" in writes, "the root file system cannot be written")


def check_storage(folder: Path) -> None:
    """Ends the script if a folder, which is removed afterwards, holds anything but what an earlier run has left."""
    try:
        found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        sys.exit(f"images: --folder: {error}")
    if others := found - CONTENT:
        sys.exit(f"images: --folder: {folder} has {min(others)}, and would be removed; name a folder of its own")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/specpool-images"), help="storage; about 20 GB")
    parser.add_argument("--python", type=Path, help="prefix of a Python 3.12; default: pyenv's")
    parser.add_argument("--torch-index-url", default="", help="as TORCH_INDEX_URL of the Dockerfile")
    parser.add_argument("--keep", action="store_true", help="keep the images, and use those that are there")
    options = parser.parse_args()
    python = options.python or max(Path.home().glob(".pyenv/versions/3.12.*"), default=None)
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing or python is None:
        sys.exit(f"images: needs root, a Python 3.12 built from source (--python), and {', '.join(missing or TOOLS)}")
    if not (python / "bin/python3.12").exists():
        sys.exit(f"images: --python: there is no {python}/bin/python3.12")
    check_storage(options.folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what is built is removed
    images = Images(options.folder)
    pair = options.folder / "pair"
    pair.mkdir(parents=True, exist_ok=True)
    os.chown(pair, USER, USER)
    try:
        if not (options.keep and images.podman("images", "--quiet", "worker", quiet=True)):
            images.build_base(python)
            for target in ("coordinator", "worker"):
                images.build(target, options.torch_index_url)
        sizes = check_content(images)
        source = ["--volume", f"{ROOT}:/source:ro", "--env", "PYTHONPATH=/source", "--entrypoint", "python"]
        images.podman("run", "--rm", *images.pod_options("rw"), *source, "worker", "-c", MAKE_PAIR)
        check_service(images)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if not options.keep:
            shutil.rmtree(options.folder, ignore_errors=True)
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
