"""Regenerate constraints.txt: `make pins`, or `make pins PINS=--upgrade` for newer versions.

Versions change only if a requirement or an option of `uv pip compile` asks for it. Each version lists the hashes of all
its files on PyPI. torch also lists the hashes of its CPU wheels, which are on PyTorch's own index.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
TORCH_CPU = ROOT / ".ci/torch-cpu.sha256"
HEADER = """\
# Versions that work together, with the hashes of all their files. `make pins` writes this file.
# Requires pip 26.1 or later: pip install --constraint constraints.txt ...
"""
COMPILE = [
    "uv", "pip", "compile", "pyproject.toml", "--output-file", CONSTRAINTS.name, "--all-extras",
    "--universal", "--python-version", "3.11", "--generate-hashes", "--no-build", "--no-annotate", "--quiet",
    "--no-header",
]  # fmt: skip


def with_cpu_wheels(constraints: str, listing: str) -> str:
    """Add the listed hashes (sha256sum format) to torch's pin. SystemExit if they belong to another version."""
    pin = re.search(r"^torch==(\S+)(?P<hashes>(?: \\\n    --hash=\S+)+)", constraints, re.MULTILINE)
    wheels = [line.split() for line in listing.splitlines()]
    if pin is None or not all(name.startswith(f"torch-{pin[1]}+cpu-") for _, name in wheels):
        raise SystemExit(f"{TORCH_CPU}: not the wheels of the pinned torch; list the hashes of that version")
    hashes = pin["hashes"].split(" \\\n    ")[1:] + [f"--hash=sha256:{digest}" for digest, _ in wheels]
    return constraints.replace(pin["hashes"], "".join(f" \\\n    {entry}" for entry in sorted(set(hashes))))


if __name__ == "__main__":
    subprocess.run([*COMPILE, *sys.argv[1:]], cwd=ROOT, check=True)
    CONSTRAINTS.write_text(HEADER + with_cpu_wheels(CONSTRAINTS.read_text(), TORCH_CPU.read_text()))
