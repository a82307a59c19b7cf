"""Stop signals: the first one drains, the second one ends the process even if something hangs."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Time to exit after a second signal, and after the server has stopped. A hanging thread must not outlast it.
FORCED_EXIT_SECONDS, EXIT_SECONDS = 1.0, 10.0
PARENT_CHECK_SECONDS = 0.5


class StopSignals:
    """Handles SIGTERM and SIGINT. Needs a running event loop."""

    def __init__(self, stop: Callable[[], None], cut_short: Callable[[], None]) -> None:
        """`stop` is called on the first signal, `cut_short` on the second."""
        self._stop, self._cut_short = stop, cut_short
        self._signalled = False
        self._exit_timer: threading.Timer | None = None
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def server_stopped(self) -> None:
        """Give the process a few seconds to exit by itself, and let any signal end it at once."""
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        self._exit_within(EXIT_SECONDS)

    def close(self) -> None:
        """Cancel the exit timer and remove the handlers."""
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._signalled:
            self._exit_within(FORCED_EXIT_SECONDS)
            self._cut_short()
        else:
            self._signalled = True
            self._stop()

    def _exit_within(self, seconds: float) -> None:
        if self._exit_timer is None:
            self._exit_timer = threading.Timer(seconds, _end)
            self._exit_timer.daemon = True
            self._exit_timer.start()


async def wait_orphaned(parent_pid: int) -> None:
    """Wait until the parent process exits."""
    while os.getppid() == parent_pid:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(PARENT_CHECK_SECONDS)
    log.warning("parent process %d exited; stopping", parent_pid)


def _end() -> None:
    log.warning("exiting without waiting for running work")
    os._exit(1)
