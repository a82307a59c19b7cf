"""Results that the pages show: the command behind each file of benchmarks/results, and reading and writing them."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.llamacpp import PYTHON_VARIABLE
from benchmarks.provenance import describe_run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks/results"
THROUGHPUT = "python -m benchmarks.throughput --concurrencies 1,4,8,16 --kinds best,adaptive --max-tokens 96"
COMMANDS = {
    "demo": "specpool demo --repeats 3",
    "demo_1": "specpool demo --repeats 3 --num-prompts 8 --concurrency 1",
    "demo_8": "specpool demo --repeats 3 --concurrency 8",
    "equality": "python -m benchmarks.equality",
    "default": f"{THROUGHPUT} --repeats 3",
    "llamacpp": "python -m benchmarks.llamacpp --concurrency 1,8,16 --repeats 3",
    "start_first": "python -m benchmarks.cost --of start --bare --repeats 1",
    "start": "python -m benchmarks.cost --of start --repeats 3",
    "coordinator": "python -m benchmarks.cost --of coordinator",
}
"""Commands of the results that pages show now. Each one prints its result as a last line of JSON."""
Results = dict[str, dict[str, Any]]


def load() -> Results:
    """All results by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def measure(name: str) -> None:
    """Run a command and save its result. CalledProcessError: it failed; its errors are on stderr."""
    run = describe_run(COMMANDS[name])
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environment = {**os.environ, "PATH": path}
    if name != "llamacpp":
        environment.pop(PYTHON_VARIABLE, None)  # the service refuses unknown variables
    command = shlex.split(COMMANDS[name])
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    (FOLDER / f"{name}.json").write_text(json.dumps({**result, "run": run}, indent=1) + "\n")
