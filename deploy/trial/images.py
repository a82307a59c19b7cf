"""Build both images of deploy/Dockerfile with podman, and run all processes from them without a Docker daemon.

    python -m deploy.trial.images [--keep] [--python PREFIX]

Needs root, Debian's podman, buildah, runc and mmdebstrap, and a Python 3.12 built from source. The Dockerfile's base
image may be unreachable. The same Debian release with that Python in /usr/local replaces it. Containers run like pods:
user 10001, read-only root, no capabilities, seccomp, and /tmp in memory. Unlike pods, they share the host's network.
The models are a tiny random pair on the CPU.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("podman", "buildah", "runc", "mmdebstrap")
RELEASE, MIRROR = "trixie", "http://deb.debian.org"
LIBRARIES = (
    "ca-certificates,netbase,tzdata,libssl3t64,libffi8,libreadline8t64,libsqlite3-0,libbz2-1.0,liblzma5,zlib1g,"
    "libncursesw6,libuuid1"
)
"""Debian packages that Python's standard library needs."""
UNUSED = ("test", "idlelib", "lib2to3", "turtledemo", "site-packages")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PATH = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
CONTENT = {"base", "pair", "pip.conf", "run", "storage"}
"""Names in the folder of the storage."""
PACKAGES = "usr/local/lib/python3.12/site-packages/"
COORDINATOR, DRAFT, TARGET = "coordinator", "draft-worker", "target-worker"
PORTS = {TARGET: 50151, DRAFT: 50152, COORDINATOR: 50150}
HEALTH_OFFSET, SERVING_SECONDS, USER = 10, 120, 10001
GENERATE = f"specpool generate --address 127.0.0.1:{PORTS[COORDINATOR]} --max-tokens 48 --json Hello".split()
MAKE_PAIR = "from pathlib import Path; from benchmarks.pair import make_tiny_pair; make_tiny_pair(Path('/pair'))"
ASK = f"from specpool import Client; print(Client('127.0.0.1:{PORTS[COORDINATOR]}').model_info())"
FIND = "import importlib.util as u, shutil; print(u.find_spec('torch') is not None, shutil.which('cc') is not None)"
EXTRAS = "import opentelemetry.sdk, prometheus_client, starlette, uvicorn; print('yes')"


class Images:
    """Podman's images and containers, in a separate storage folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._podman = ["podman", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self._podman += ["--runtime", "runc"]
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._files = f"nofile={files}:{files}"  # podman would raise the limit, which a container may not

    def podman(self, *arguments: str, quiet: bool = False, **options: object) -> str:
        """Run podman. Return its standard output."""
        return run(*self._podman, *arguments, quiet=quiet, **options)

    def build_base(self, python: Path) -> None:
        """Imports the base image: Debian, with this Python in /usr/local."""
        root = self.folder / "base"
        suites = [f"deb {MIRROR}/debian {suite} main" for suite in (RELEASE, f"{RELEASE}-updates")]
        suites.append(f"deb {MIRROR}/debian-security {RELEASE}-security main")
        run("mmdebstrap", "--variant=minbase", f"--include={LIBRARIES}", RELEASE, str(root), *suites)
        shutil.copytree(python, root / "usr/local", symlinks=True, dirs_exist_ok=True, ignore=ignore_unused)
        for name in ("python", "python3"):
            (root / "usr/local/bin" / name).unlink(missing_ok=True)
            (root / "usr/local/bin" / name).symlink_to("python3.12")
        run("chroot", str(root), "ldconfig")
        run("chroot", str(root), "/usr/local/bin/python3", "-m", "ensurepip", "--default-pip")
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
            self.podman("import", "--quiet", "--change", f"ENV {PATH}", "-", "base", stdin=archive.stdout)
        shutil.rmtree(root)

    def build(self, target: str, index: str) -> None:
        """Build a stage of the Dockerfile, with this machine's CA certificates for package mirrors."""
        pip = self.folder / "pip.conf"
        pip.write_text(f"[global]\ncert = {CERTIFICATES}\n")
        # Without layers: from its cache, buildah 1.28 mounts a stage without the files of its RUN steps.
        self.podman(
            "build", "--layers=false", "--isolation", "chroot", "--network", "host", "--from", "localhost/base",
            "--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro", "--volume", f"{pip}:/etc/pip.conf:ro",
            "--ulimit", self._files, "--build-arg", f"TORCH_INDEX_URL={index}", "--file", "deploy/Dockerfile",
            "--target", target, "--tag", target, ".",
        )  # fmt: skip

    def start(self, name: str, image: str, *arguments: str, **environment: object) -> None:
        """Start a container as Kubernetes starts a pod's."""
        variables = [word for key, value in environment.items() for word in ("--env", f"SPECPOOL_{key}={value}")]
        self.podman("run", "--detach", "--name", name, *variables, *self.pod_options(), image, *arguments)

    def pod_options(self, writable: str = "ro") -> list[str]:
        """Options of every container; the models are in /pair."""
        return [
            "--network", "host", "--read-only", "--read-only-tmpfs=false", "--cap-drop", "all",
            "--security-opt", "no-new-privileges", "--tmpfs", "/tmp:rw,exec,mode=1777,size=256m",
            "--volume", f"{self.folder / 'pair'}:/pair:{writable}", "--ulimit", self._files,
            "--ulimit", "nproc=4096:4096",
        ]  # fmt: skip

    def inside(self, image: str, *command: str) -> str:
        """The output of a command in a new container."""
        entry, *arguments = command
        return self.podman("run", "--rm", *self.pod_options(), "--entrypoint", entry, image, *arguments, quiet=True)

    def content_mib(self, image: str, *folders: str) -> float:
        """MiB of these folders of an image, or of all its files."""
        root = Path(self.podman("image", "mount", image, quiet=True).strip())
        found = [str(path) for folder in folders or (".",) if (path := root / folder).exists()]
        size = run("du", "--summarize", "--total", "--block-size=1", *found, quiet=True).split()[-2] if found else "0"
        self.podman("image", "unmount", image, quiet=True)
        return round(int(size) / 2**20, 1)


def run(*command: str, quiet: bool = False, **options: object) -> str:
    """Show and run a command. Return its standard output, or end the script if it fails."""
    if not quiet:
        print("+", " ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"images: {' '.join(command[:1])} ended with status {done.returncode}: {done.stdout[-2000:]}")
    return str(done.stdout)


def ignore_unused(folder: str, names: list[str]) -> list[str]:
    """The parts of Python that the official image leaves out too."""
    return [name for name in names if name in UNUSED or name == "__pycache__" or name.startswith("config-3")]


def require(holds: bool, what: str) -> None:
    """Print that something holds, or end the script."""
    if not holds:
        sys.exit(f"images: FAILED: {what}")
    print(f"ok: {what}", file=sys.stderr, flush=True)


def check_content(images: Images) -> dict[str, object]:
    """Check the content of both images. Return their sizes."""
    sizes: dict[str, object] = {"base_mib": images.content_mib("base")}
    torch = [PACKAGES + name for name in ("torch", "nvidia", "triton")]
    (ROOT / "build").mkdir(exist_ok=True)
    for image in ("coordinator", "worker"):
        sizes[f"{image}_mib"], sizes[f"{image}_torch_mib"] = (
            images.content_mib(image),
            images.content_mib(image, *torch),
        )
        user = images.inside(image, "id", "-u").strip()
        require(user == str(USER), f"{image} runs as user {user}")
        freeze = images.inside(image, "python", "-m", "pip", "freeze", "--all")
        (ROOT / f"build/{image}.txt").write_text(freeze)
        sizes[f"{image}_packages"] = len(freeze.splitlines())
        extras = images.inside(image, "python", "-c", EXTRAS).strip()
        require(extras == "yes", f"{image} can serve HTTP and metrics, and send traces")
        write_sbom(image)
    require(images.inside("coordinator", "python", "-c", FIND).split() == ["False"] * 2, "coordinator: no torch, no cc")
    require(images.inside("worker", "python", "-c", FIND).split() == ["True"] * 2, "worker: torch and cc")
    return sizes


def write_sbom(image: str) -> None:
    """Write build/sbom-IMAGE.json (CycloneDX) with the tools of `make sbom`, if they are installed."""
    tool = ROOT / ".venv/tools/bin/cyclonedx-py"
    if not tool.exists():
        return print("no .venv/tools (`make sbom`): no SBOM of the images", file=sys.stderr)
    run(str(tool), "requirements", "--output-reproducible", "-o", f"build/sbom-{image}.json", f"build/{image}.txt")
    components = json.loads((ROOT / f"build/sbom-{image}.json").read_text())["components"]
    return require(len(components) > 40, f"build/sbom-{image}.json lists {len(components)} packages")


@contextmanager
def service(images: Images) -> Iterator[None]:
    """Run the three processes. At the end all must exit on SIGTERM."""
    address = "127.0.0.1"
    common = {"DEVICE": "cpu", "THREADS": 1, "MAX_SEQUENCES": 4}
    addresses = {"TARGET_ADDRESS": f"{address}:{PORTS[TARGET]}", "DRAFT_ADDRESS": f"{address}:{PORTS[DRAFT]}"}
    processes: dict[str, tuple[str, str | None, Mapping[str, object]]] = {
        TARGET: ("worker", f"specpool-{TARGET}", {**common, "MODEL": "/pair/target"}),
        DRAFT: ("worker", f"specpool-{DRAFT}", {**common, "MODEL": "/pair/draft"}),
        COORDINATOR: ("coordinator", None, addresses),
    }
    try:
        for name, (image, command, settings) in processes.items():
            health = PORTS[name] + HEALTH_OFFSET
            arguments = [command] if command else []
            images.start(name, image, *arguments, HOST=address, PORT=PORTS[name], HEALTH_PORT=health, **settings)
        for name in processes:
            wait_serving(images, name, PORTS[name] + HEALTH_OFFSET)
        yield
        for name in reversed(processes):
            images.podman("stop", "--time", "45", name)
            status = images.podman("inspect", "--format", "{{.State.ExitCode}}", name, quiet=True).strip()
            require(status == "0", f"{name} ends on SIGTERM with status {status}")
    finally:
        images.podman("rm", "--force", "--ignore", *processes, quiet=True)


def wait_serving(images: Images, name: str, port: int) -> None:
    """Wait until the image's health check succeeds."""
    check = f"python -m specpool.healthcheck 127.0.0.1:{port} && echo serving || true"
    deadline = time.monotonic() + SERVING_SECONDS
    while True:
        running = images.podman("container", "inspect", "--format", "{{.State.Running}}", name, quiet=True).strip()
        if running == "false" or time.monotonic() > deadline:
            sys.exit(f"images: {name} does not serve:\n{images.podman('logs', name, stderr=subprocess.STDOUT)}")
        if "serving" in images.podman("exec", name, "sh", "-c", check, quiet=True, stderr=subprocess.DEVNULL):
            return require(True, f"{name} serves, as its health check says")
        time.sleep(0.5)


def check_service(images: Images) -> None:
    """Generate with and without speculation, from inside the coordinator's container."""
    with service(images):
        info = images.podman("exec", COORDINATOR, "python", "-c", ASK, quiet=True)
        require("EQUIVALENCE_BITWISE" in info, "the target proves that its tokens are exact")
        require("runs slowly" not in info, "the target compiled its pass on the read-only root")
        speculative, plain = (
            json.loads(images.podman("exec", COORDINATOR, *GENERATE, f"--num-speculative-tokens={k}")) for k in (3, 0)
        )
        drafted = int(speculative["speculative_decoding"]["num_draft_tokens"])
        require(drafted > 0, f"{drafted} tokens were drafted")
        require(speculative["token_ids"] == plain["token_ids"], f"{len(plain['token_ids'])} tokens are those of k = 0")
        writes = images.podman("exec", COORDINATOR, "sh", "-c", "touch /probe 2>&1 || true", quiet=True)
        require("Read-only" in writes, "the root file system cannot be written")


def check_storage(folder: Path) -> None:
    """End the script if the folder has unknown files, because the script removes the folder."""
    try:
        found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        sys.exit(f"images: --folder: {error}")
    if others := found - CONTENT:
        sys.exit(f"images: --folder: {folder} has {min(others)}, and would be removed; name a folder of its own")


def main() -> None:
    """Parse the command line, build the images, and check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/specpool-images"), help="storage; about 20 GB")
    parser.add_argument("--python", type=Path, help="prefix of a Python 3.12; default: pyenv's")
    parser.add_argument("--torch-index-url", default="", help="TORCH_INDEX_URL of the Dockerfile")
    parser.add_argument("--keep", action="store_true", help="keep the images, and use existing ones")
    options = parser.parse_args()
    python = options.python or max(Path.home().glob(".pyenv/versions/3.12.*"), default=None)
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing or python is None:
        sys.exit(f"images: needs root, a Python 3.12 built from source (--python), and {', '.join(missing or TOOLS)}")
    if not (python / "bin/python3.12").exists():
        sys.exit(f"images: --python: there is no {python}/bin/python3.12")
    check_storage(options.folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so SIGTERM removes the storage too
    images, pair = Images(options.folder), options.folder / "pair"
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
