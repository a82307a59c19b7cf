"""Processes of ranks. They never get stop signals, and end with their parent or rank 0."""

import logging
import os
import signal
import subprocess
import sys
from typing import IO, NoReturn

from specpool.engine.config.options import EngineOptions

log = logging.getLogger(__name__)

STOPS = {signal.SIGINT, signal.SIGTERM}
"""Stop signals. A terminal signals all ranks, but only rank 0 reacts: it drains, then ends the others."""


def start_rank(rank: int, options: EngineOptions, stdin: int | IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start a process for a rank. `options`: with the device of this rank. `stdin`: a link to rank 0, or a pipe."""
    command = [sys.executable, "-P", "-m", "specpool.engine.startup.follower", str(rank), options.model_dump_json()]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # the process inherits the mask
    try:
        return subprocess.Popen(command, stdin=stdin)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_process(reason: str) -> NoReturn:
    """End this process at once, even if its threads are blocked."""
    log.error("%s: the process ends", reason)
    logging.shutdown()
    os._exit(1)
