"""Regenerates constraints.txt: `make pins`, or `make pins PINS=--upgrade` for newer versions.

Versions stay as they are unless a requirement or an option of `uv pip compile` asks for others. Each version has the
hashes of all its files on PyPI, for every platform; torch also has those of its CPU wheels, which lie on an index of
their own.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
TORCH_CPU = ROOT / ".ci/torch-cpu.sha256"
HEADER = """\
# Versions that are known to work together, with the hashes of all their files. `make pins` writes this file.
# pip 26.1 is the first to take hashes from constraints: pip install --constraint constraints.txt ...
"""
COMPILE = [
    "uv", "pip", "compile", "pyproject.toml", "--output-file", CONSTRAINTS.name, "--all-extras",
    "--universal", "--python-version", "3.11", "--generate-hashes", "--no-build", "--no-annotate", "--quiet",
    "--no-header",
]  # fmt: skip


def with_cpu_wheels(constraints: str, listing: str) -> str:
    """The constraints with the listed hashes (format of sha256sum) added to torch's; SystemExit for another version."""
    pin = re.search(r"^torch==(\S+)(?P<hashes>(?: \\\n    --hash=\S+)+)", constraints, re.MULTILINE)
    wheels = [line.split() for line in listing.splitlines()]
    if pin is None or not all(name.startswith(f"torch-{pin[1]}+cpu-") for _, name in wheels):
        raise SystemExit(f"{TORCH_CPU}: not the wheels of the torch that is pinned; list those of its version")
    hashes = pin["hashes"].split(" \\\n    ")[1:] + [f"--hash=sha256:{digest}" for digest, _ in wheels]
    return constraints.replace(pin["hashes"], "".join(f" \\\n    {entry}" for entry in sorted(set(hashes))))


if __name__ == "__main__":
    subprocess.run([*COMPILE, *sys.argv[1:]], cwd=ROOT, check=True)
    CONSTRAINTS.write_text(HEADER + with_cpu_wheels(CONSTRAINTS.read_text(), TORCH_CPU.read_text()))
