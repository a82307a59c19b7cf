"""Virtual time: an event loop that jumps to its next timer instead of waiting."""

import asyncio
import math
import random
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock


class DeadlockError(Exception):
    """No callback is ready and no timer is set, so nothing can ever happen again."""


class OrderedTask(asyncio.Task[Any]):
    """A task with the same hash in each run, so that sets of tasks have the same order."""

    def __init__(self, serial: int, coroutine: Any, **options: Any) -> None:
        self._serial = serial
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._serial


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without sockets, threads or real time. Seconds start at 0."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector: Any = self
        self.lead = 0.0
        """Seconds by which the code that runs now is ahead of the loop. See `working`."""
        self.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.errors: list[dict[str, Any]] = []
        """Exceptions that no task has handled."""
        serials = count()
        self.set_task_factory(
            lambda loop, coroutine, **options: OrderedTask(next(serials), coroutine, loop=loop, **options)
        )

    def time(self) -> float:
        return self._now

    @property
    def now(self) -> float:
        """The time that code sees."""
        return self._now + self.lead

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run a blocking function of a thread. Its `lead` is then the time that it has taken."""
        self.lead = 0.0
        try:
            yield
        finally:
            self.lead = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        """Jump to the next timer. The base class calls this to wait for events."""
        if timeout is None:
            raise DeadlockError
        # A timer too short to move the clock would be due again and again.
        self._now = math.nextafter(self._now + timeout, math.inf)
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


@contextmanager
def virtual_time(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Let all code see the time of the loop, and draw ids and chances from a seed."""
    rng = random.Random(f"ids {seed}")

    def now() -> float:
        return loop.now

    def now_ns() -> int:
        return round(loop.now * 1e9)

    def new_id() -> uuid.UUID:
        return uuid.UUID(int=rng.getrandbits(128), version=4)

    with ExitStack() as patches:
        for name in ("time.monotonic", "time.perf_counter", "time.time"):
            patches.enter_context(mock.patch(name, now))
        patches.enter_context(mock.patch("time.perf_counter_ns", now_ns))
        patches.enter_context(mock.patch("uuid.uuid4", new_id))
        patches.enter_context(mock.patch("random.random", rng.random))
        yield
