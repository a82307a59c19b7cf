"""A node other than 0 of a divided model: it runs its ranks as processes, which serve rank 0 until it ends."""

import signal
import subprocess
import sys
import time
from typing import NoReturn

from specpool.engine.config.devices import pick_rank_devices
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.run.connections import STOPS, signals_held

POLL_SECONDS = 0.1


def run_node(program: str, options: EngineOptions) -> NoReturn:
    """Runs until SIGTERM or SIGINT, or until the first of its ranks ends, as all do when rank 0 ends; then ends."""
    for number in STOPS:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        devices = pick_rank_devices(options)
    except UnsupportedModelError as error:
        sys.exit(f"{program}: {error}")
    command = [sys.executable, "-P", "-m", "specpool.engine.startup.follower"]
    each = [options.model_copy(update={"device": device}).model_dump_json() for device in devices]
    # Their standard input closes when this process ends, even if it is killed: then they end, too.
    with signals_held():
        ranks = [subprocess.Popen([*command, its], stdin=subprocess.PIPE) for its in each]
    try:
        while all(rank.poll() is None for rank in ranks):
            time.sleep(POLL_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    sys.exit(max(rank.returncode for rank in ranks))
