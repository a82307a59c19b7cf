"""The thread that runs a worker's model, one function at a time, and the watchdog that notices when it hangs."""

import asyncio
import atexit
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from specpool.protocol.errors import UnavailableError

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Maximum number of waiting functions. The rounds of open streams stay far below it."""
FRAMES_SHOWN = 12
EXIT_SECONDS = 5.0
"""Time for a running function to finish at the exit of an interpreter that did not close its thread."""

T = TypeVar("T")


CHECKS = 10
"""Number of checks within the time limit."""


@dataclass(eq=False)
class WorkItem:
    """A function for the thread. `name` describes it in messages."""

    name: str
    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]
    context: Context = field(default_factory=copy_context)
    """Context of the caller, which labels its log lines."""
    began: float = 0.0
    """Start in seconds of `time.monotonic`."""

    outcome: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        """Call the function, and keep its result or error."""
        try:
            self.outcome = self.context.run(self.function)
        except BaseException as raised:
            # A future cannot hold a StopIteration.
            self.error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised

    def deliver(self) -> None:
        """Hand the result or error to the event loop."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if self.result.done():  # cancelled
            return
        if self.error is None:
            self.result.set_result(self.outcome)
        else:
            self.result.set_exception(self.error)


class ModelThread:
    """A thread that runs functions one after the other, in call order.

    If another function waits, a second thread delivers the result. Waking the event loop releases the interpreter lock,
    and this thread could start the next function only once the loop has built the response.
    """

    def __init__(self, on_death: Callable[[str], None] = lambda reason: None) -> None:
        """`on_death`: called with the reason on a thread that dies of an error outside the work items."""
        self._on_death = on_death
        self.running: WorkItem | None = None
        """The work item that runs now."""
        self._waiting: deque[WorkItem] = deque()
        self._changed = threading.Condition()
        self._closed = False
        # A daemon, so a function that never ends does not keep the process alive.
        self._thread = threading.Thread(target=self._live, args=(self._work,), name="model", daemon=True)
        self._finished: SimpleQueue[WorkItem | None] = SimpleQueue()
        self._delivery = threading.Thread(target=self._live, args=(self._deliver,), name="results", daemon=True)

    @property
    def waiting(self) -> int:
        """Number of functions that wait for the thread."""
        return len(self._waiting)

    async def run(self, name: str, function: Callable[[], T]) -> T:
        """Run a function and return its result. Raises UnavailableError if too many functions wait.

        A caller that is cancelled before its turn leaves no work behind.
        """
        if self._thread.ident is None:
            # Otherwise the interpreter ends the thread, which aborts the process if the thread runs compiled code.
            atexit.register(self.close, EXIT_SECONDS)
            self._thread.start()
            self._delivery.start()
        loop = asyncio.get_running_loop()
        item = WorkItem(name, function, loop, loop.create_future())
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                raise UnavailableError(f"{len(self._waiting)} calls wait for the model")
            self._waiting.append(item)
            self._changed.notify()
        try:
            result: T = await item.result
        except asyncio.CancelledError:
            with self._changed, suppress(ValueError):  # it has begun
                self._waiting.remove(item)
            raise
        return result

    def stack(self) -> str:
        """Return the thread's call stack, innermost function first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        calls = reversed(traceback.extract_stack(frame, FRAMES_SHOWN)) if frame is not None else ()
        return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls)

    def close(self, timeout: float | None = None) -> bool:
        """Drop waiting functions, and wait up to `timeout` seconds for the running one. Return whether it has ended."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _live(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            self._on_death(f"the {threading.current_thread().name} thread has died ({error!r})")
            raise

    def _work(self) -> None:
        while self._run_next():
            pass
        self._finished.put(None)

    def _run_next(self) -> bool:
        """Run one function; False once closed. A separate call, so no local keeps the work item alive."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return False
            item = self._waiting.popleft()
            item.began = time.monotonic()
            self.running = item
        item.run()
        self.running = None
        if self._waiting:
            self._finished.put(item)
        else:
            item.deliver()
        return True

    def _deliver(self) -> None:
        while (item := self._finished.get()) is not None:
            item.deliver()
            del item


class Watchdog:
    def __init__(
        self, thread: ModelThread, progress: Callable[[], int], seconds: float, on_change: Callable[[bool], None]
    ) -> None:
        """`progress`: a number that changes while work progresses. `on_change`: called with True when the thread hangs,
        and with False once work progresses again."""
        self._thread, self._progress, self._on_change = thread, progress, on_change
        self._seconds = seconds
        self._seen: tuple[WorkItem | None, int] = (None, 0)
        self._stalled = 0.0
        self._checked = time.monotonic()
        self.hanging: str | None = None
        """A message for callers while the thread hangs; otherwise None."""

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / CHECKS)
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Compare the work item and its progress with the last check. `now`: monotonic seconds."""
        # Do not count time in which the whole process was stopped.
        elapsed = min(now - self._checked, 2 * self._seconds / CHECKS)
        self._checked = now
        seen = self._thread.running, self._progress()
        self._stalled = self._stalled + elapsed if seen == self._seen and seen[0] is not None else 0.0
        self._seen = seen
        if self.hanging is not None and not self._stalled:
            log.warning("the model thread makes progress again")
            self.hanging = None
            self._on_change(False)
        elif self.hanging is None and seen[0] is not None and self._stalled > self._seconds:
            self.hanging = f"the model hangs: {seen[0].name} has made no progress for {self._stalled:.0f} s"
            running = now - seen[0].began
            log.error("%s, and has run for %.0f s; it is in %s", self.hanging, running, self._thread.stack())
            self._on_change(True)
