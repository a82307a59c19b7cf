"""Signals that ask a process to stop: the first begins a drain, the second ends the process, whatever it waits for."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Time to end in order after a second signal, and after the server has stopped. A thread that hangs must not outlast it.
HASTY_END_SECONDS, END_SECONDS = 1.0, 10.0


class StopSignals:
    """SIGTERM and SIGINT of this process, which must have a running event loop."""

    def __init__(self, stop: Callable[[], None], cut_short: Callable[[], None]) -> None:
        """`stop` is called at the first signal, `cut_short` at the second."""
        self._stop, self._cut_short = stop, cut_short
        self._signalled = False
        self._last_resort: threading.Timer | None = None
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def server_stopped(self) -> None:
        """From now on the process has a few seconds to end by itself, and any signal ends it at once: nothing is left
        to do that a client would miss, and the event loop may be blocked."""
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        self._end_within(END_SECONDS)

    def close(self) -> None:
        """Lets the process live on."""
        if self._last_resort is not None:
            self._last_resort.cancel()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._signalled:
            self._end_within(HASTY_END_SECONDS)
            self._cut_short()
        else:
            self._signalled = True
            self._stop()

    def _end_within(self, seconds: float) -> None:
        if self._last_resort is None:
            self._last_resort = threading.Timer(seconds, _end)
            self._last_resort.daemon = True
            self._last_resort.start()


def _end() -> None:
    log.warning("ended without waiting for what still runs")
    os._exit(1)
