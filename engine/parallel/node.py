"""A node other than 0 of a divided model: its ranks as processes, which serve rank 0 until it ends."""

import signal
import subprocess
import sys
import time

from engine.options import EngineOptions
from engine.parallel.devices import devices_of

POLL_SECONDS = 0.1


def run_node(options: EngineOptions) -> int:
    """Runs until the first of the ranks ends, or until SIGTERM; returns the exit status.

    UnsupportedModelError: there are no devices for them.
    """
    assert options.master_addr is not None
    devices = devices_of(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    command = [sys.executable, "-P", "-m", "engine.parallel.follower", options.master_addr, str(options.master_port)]
    ranks = [subprocess.Popen([*command, device], stdin=subprocess.DEVNULL) for device in devices]
    try:
        while True:
            for rank in ranks:
                if (status := rank.poll()) is not None:
                    return status
            time.sleep(POLL_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
