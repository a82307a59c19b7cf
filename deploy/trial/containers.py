"""Images and containers of podman, which needs no daemon, in a storage of their own."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASE = "trixie"
MIRROR = "http://deb.debian.org"
# Packages that Python's standard library needs.
LIBRARIES = (
    "ca-certificates,netbase,tzdata,libssl3t64,libffi8,libreadline8t64,libsqlite3-0,libbz2-1.0,liblzma5,zlib1g,"
    "libncursesw6,libuuid1"
)
UNUSED = ("test", "idlelib", "lib2to3", "turtledemo", "site-packages")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class Images:
    """Images and containers in a storage of their own, which is one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._podman = ["podman", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self._podman += ["--runtime", "runc"]

    def podman(self, *arguments: str, quiet: bool = False, **options: object) -> str:
        """Runs podman; returns what it prints on standard output."""
        return run(*self._podman, *arguments, quiet=quiet, **options)

    def build_base(self, python: Path) -> None:
        """Imports the base image: Debian, and this Python in /usr/local."""
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
        path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
            self.podman("import", "--quiet", "--change", f"ENV {path}", "-", "base", stdin=archive.stdout)
        shutil.rmtree(root)

    def build(self, target: str, index: str) -> None:
        """Runs the steps of a stage of the Dockerfile, and of all stages that it needs, every time."""
        pip = self.folder / "pip.conf"
        pip.write_text(f"[global]\ncert = {CERTIFICATES}\n")
        machine = [f"{CERTIFICATES}:{CERTIFICATES}:ro", f"{pip}:/etc/pip.conf:ro"]  # this machine may use a mirror
        options = [word for mount in machine for word in ("--volume", mount)]
        limit = f"nofile={open_files()}:{open_files()}"
        # Without cached layers: buildah 1.28 mounts a stage from its cache without the files that its RUN steps made.
        self.podman(
            "build", "--layers=false", "--isolation", "chroot", "--network", "host", "--from", "localhost/base",
            *options, "--ulimit", limit, "--build-arg", f"TORCH_INDEX_URL={index}",
            "--file", "deploy/Dockerfile", "--target", target, "--tag", target, ".",
        )  # fmt: skip

    def start(self, name: str, image: str, *arguments: str, **environment: str) -> None:
        """Starts a container as Kubernetes would start that of a pod."""
        variables = [word for key, value in environment.items() for word in ("--env", f"{key}={value}")]
        self.podman("run", "--detach", "--name", name, *variables, *self.pod_options(), image, *arguments)

    def pod_options(self, writable: str = "ro") -> list[str]:
        """How every container runs: a read-only root, no capabilities, /tmp in memory, the models in /pair."""
        limits = [f"nofile={open_files()}:{open_files()}", "nproc=4096:4096"]  # podman would raise both
        return [
            "--network", "host", "--read-only", "--read-only-tmpfs=false", "--cap-drop", "all",
            "--security-opt", "no-new-privileges", "--tmpfs", "/tmp:rw,exec,mode=1777,size=256m",
            "--volume", f"{self.folder / 'pair'}:/pair:{writable}",
            *(word for limit in limits for word in ("--ulimit", limit)),
        ]  # fmt: skip

    def inside(self, image: str, *command: str, options: tuple[str, ...] = (), quiet: bool = True) -> str:
        """What a command prints in a new container of an image."""
        entry, *arguments = command
        named = [*self.pod_options(), *options, "--entrypoint", entry, image]
        return self.podman("run", "--rm", *named, *arguments, quiet=quiet)

    def content_mib(self, image: str, *folders: str) -> float:
        """MiB of the files in these folders of an image, or of all its files."""
        root = Path(self.podman("image", "mount", image, quiet=True).strip())
        found = [str(path) for folder in folders or (".",) if (path := root / folder).exists()]
        size = run("du", "--summarize", "--total", "--block-size=1", *found, quiet=True).split()[-2] if found else "0"
        self.podman("image", "unmount", image, quiet=True)
        return round(int(size) / 2**20, 1)


def run(*command: str, quiet: bool = False, **options: object) -> str:
    """Shows a command, runs it, and returns its standard output; ends the script if it fails."""
    if not quiet:
        print("+", " ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"images: {' '.join(command[:1])} ended with status {done.returncode}: {done.stdout[-2000:]}")
    return str(done.stdout)


def ignore_unused(folder: str, names: list[str]) -> list[str]:
    """Names that the official image leaves out of Python too."""
    return [name for name in names if name in UNUSED or name == "__pycache__" or name.startswith("config-3")]


def open_files() -> int:
    """The limit of file descriptors, which containers cannot exceed."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
