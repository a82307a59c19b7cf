"""Time from `specpool up` to the first answer, and memory of the three processes, with the embedded pair.

    python -m benchmarks.start [--repeats 3] [--bare] [--flags "--threads 2"] [--output FOLDER]

Each run starts the command anew, waits until it serves, and has one token generated, then 16. Seconds are counted from
the start of the command; the pair exists already and its files are mostly in the machine's cache, since they were read
before; all but the first run may find the compiled passes that another has kept. `--bare`: each run has an empty cache
folder of its own, so that pip fetches the pair, it is made, and passes are compiled, as on a machine that never ran it.
Memory is that of each process after the second answer, and the most that it had: pages of mapped files count. Only the
command line and the client are used, so that other commits can be measured by this file.
The last line printed is JSON.
"""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from grpc import RpcError

from benchmarks.report import finish, output_folder, progress, show, whole
from specpool.client import Client

UP = "import sys; from specpool.cli.main import main; sys.exit(main())"
ANSWERS = {"first token": 1, "16 tokens": 16}
PROMPT = "The capital of Norway is"
KINDS = ("target_worker", "draft_worker", "coordinator")
MEASURES = {"resident": "VmRSS", "of which files": "RssFile", "most": "VmHWM"}
"""Of the memory of a process, by their names in /proc/PID/status."""


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=whole(1, 1000), default=3)
    parser.add_argument("--bare", action="store_true", help="make the pair in each run")
    parser.add_argument("--flags", type=shlex.split, default=[], help="further flags of `specpool up`, in one argument")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    try:
        runs = [run(options.flags, options.bare) for _ in progress(range(options.repeats), "starts")]
    except RuntimeError as error:
        parser.exit(2, f"benchmarks.start: {error}\n")
    seconds = [{"until": name, **spread([its["seconds"][name] for its in runs])} for name in runs[0]["seconds"]]
    memory = [
        {"process": kind, **{name: statistics.median(its["memory"][kind][name] for its in runs) for name in MEASURES}}
        for kind in KINDS
        if kind in runs[0]["memory"]
    ]
    show("seconds from the start of the command", seconds)
    show("MiB", memory)
    finish("start", {"bare": options.bare, "flags": options.flags, "seconds": seconds, "mib": memory}, options.output)


def run(flags: list[str], bare: bool) -> dict[str, Any]:
    """Seconds and memory of one start. RuntimeError: it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        own = {"XDG_CACHE_HOME": scratch} if bare else {}
        began = time.perf_counter()
        up = subprocess.Popen(
            [sys.executable, "-c", UP, "up", "--port", "0", *flags],
            stdout=subprocess.PIPE, text=True, env={**os.environ, **own},
        )  # fmt: skip
        try:
            assert up.stdout is not None
            serving = re.search(r"serving at (\S+)", up.stdout.readline())
            if serving is None:
                raise RuntimeError(f"`specpool up` ended with status {up.wait()}")
            seconds = {"it serves": time.perf_counter() - began}
            with Client(serving[1]) as client:
                for name, tokens in ANSWERS.items():
                    try:
                        client.generate(PROMPT, max_tokens=tokens)
                    except RpcError as error:
                        raise RuntimeError(f"no answer of {tokens} tokens: {error.details()}") from error
                    seconds[name] = time.perf_counter() - began
            return {"seconds": seconds, "memory": memory_of_children(up.pid)}
        finally:
            up.terminate()
            up.communicate()


def memory_of_children(pid: int) -> dict[str, dict[str, float]]:
    """MiB of each of the processes that a process has started, by their modules."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_text()
        status = dict(re.findall(r"(\w+):\s+(\d+) kB", Path(f"/proc/{child}/status").read_text()))
        (kind,) = (kind for kind in KINDS if f"{kind}.server" in command)
        found[kind] = {name: round(int(status[key]) / 1024, 1) for name, key in MEASURES.items()}
    return found


def spread(numbers: list[float]) -> dict[str, float]:
    """The median, the least and the greatest."""
    return {"median": round(statistics.median(numbers), 2), "least": round(min(numbers), 2),
            "greatest": round(max(numbers), 2)}  # fmt: skip


if __name__ == "__main__":
    main()
