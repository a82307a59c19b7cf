"""The thread that runs a worker's model, one function at a time, without blocking the event loop."""

import asyncio
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
from typing import Any, TypeVar

from specpool.protocol.errors import UnavailableError

MAX_WAITING = 256
"""Maximum number of waiting functions. The rounds of open streams stay far below it."""
FRAMES_SHOWN = 12

T = TypeVar("T")


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

    def run(self) -> None:
        """Calls the function, and hands its result or error to the event loop."""
        outcome, error = None, None
        try:
            outcome = self.context.run(self.function)
        except BaseException as raised:
            # A future takes no StopIteration.
            error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._finish, outcome, error)

    def _finish(self, outcome: Any, error: BaseException | None) -> None:
        if self.result.done():  # cancelled
            return
        if error is None:
            self.result.set_result(outcome)
        else:
            self.result.set_exception(error)


class ModelThread:
    """A thread that runs functions one after the other, in call order."""

    def __init__(self) -> None:
        self.running: WorkItem | None = None
        """The work item that runs now."""
        self._waiting: deque[WorkItem] = deque()
        self._changed = threading.Condition()
        self._closed = False
        # A daemon, so that a function that never ends does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)

    @property
    def waiting(self) -> int:
        """Number of waiting functions."""
        return len(self._waiting)

    async def run(self, name: str, function: Callable[[], T]) -> T:
        """The function's result. UnavailableError: too many functions wait.

        A caller that is cancelled before its turn leaves no work behind.
        """
        if self._thread.ident is None:
            self._thread.start()
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
        """The functions that the thread is in, innermost first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        calls = reversed(traceback.extract_stack(frame, FRAMES_SHOWN * 2)[-FRAMES_SHOWN:]) if frame is not None else ()
        return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls)

    def close(self, timeout: float | None = None) -> bool:
        """Drops waiting functions, and waits up to `timeout` seconds for the running one; whether it has ended."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs one function; False once closed. A call of its own, so that no local keeps the work item alive."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return False
            item = self._waiting.popleft()
            item.began = time.monotonic()
            self.running = item
        item.run()
        self.running = None
        return True
