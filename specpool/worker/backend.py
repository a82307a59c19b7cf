"""The interface between the host and a model, the startup of a worker, and errors that its process cannot survive."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from enum import Enum
from typing import Protocol

from specpool.protocol.rounds import RoundLimits
from specpool.protocol.worker_info import CacheLoad, ModelWork, WorkerInfo

log = logging.getLogger(__name__)

_MEMORY_TYPES = {"OutOfMemoryError"}
_DEVICE_TYPES = {"AcceleratorError", "CudaError", "DistBackendError"}
"""Names of torch's exceptions for CUDA calls and NCCL."""
# Prefixes of messages from torch, its libraries and Triton. A client's text never comes first in a message.
_DEVICE_MESSAGE = re.compile(
    r"(CUDA (driver )?|cuBLAS |cuDNN |cusolver |NCCL )error\b|Triton Error \[CUDA\]|NVML_SUCCESS == "
)
# If NVML fails as well, torch reports a lack of memory as a failed assertion (pytorch #112377).
_MEMORY_MESSAGE = re.compile(r"out of memory|_ALLOC_FAILED|^NVML_SUCCESS == ")
_HOST_MEMORY_MESSAGE = re.compile(r"(\[enforce fail at [^]]*\].*)?DefaultCPUAllocator: can't allocate|std::bad_alloc")


MAX_FAILURE_CHARACTERS = 1000
"""Maximum length of an error. Libraries list thousands of tensors, but coordinators refuse large responses."""


class Backend(Protocol):
    """A worker's model, called on the model thread. Any thread may read the counters."""

    @property
    def carried_draft(self) -> "Backend | None":
        """The draft that a target worker carries, if any."""

    @property
    def realign_ns(self) -> int:
        """Nanoseconds spent on realignment so far, including the draft's."""

    @property
    def draft_ns(self) -> int:
        """Nanoseconds that the carried draft has taken so far, without realignment."""

    @property
    def passes(self) -> int:
        """Forward passes so far, including the draft's."""

    @property
    def work(self) -> ModelWork:
        """The work of the worker's model, without the draft's."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum tokens of a forward pass."""

    def info(self) -> WorkerInfo:
        """Describe the model and its load. Called once, when the model is loaded."""

    @property
    def load(self) -> CacheLoad:
        """Return the load of the cache. Called after each work item, so it must take only microseconds."""

    @property
    def limits(self) -> RoundLimits:
        """Limits for the items of a round. Readable from any thread."""

    def release(self, coordinator_id: str, sequence_ids: list[int] | None) -> int:
        """Free sequences, or all of a coordinator; return how many held a slot."""

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Record that a coordinator is alive."""

    def orphan(self, coordinator_id: str) -> None:
        """Let a coordinator's sequences yield their slots until its lease is renewed."""

    def expire(self, now: float, lease_seconds: float) -> int:
        """Free the sequences of silent coordinators; return how many."""

    def shrink_passes(self) -> bool:
        """Free unused device memory and make passes smaller. Return False if they cannot be smaller."""


class Failure(Enum):
    """Why a worker cannot continue, for the log."""

    HOST_MEMORY = "out of memory"
    DEVICE_MEMORY = "out of device memory"
    """A smaller pass may still succeed."""
    DEVICE = "the device has failed"
    """After a failed call, CUDA fails all later calls of the process with the same error."""


class DeviceFailedError(Exception):
    """The model cannot be loaded because its device failed or ran out of memory. Another start may succeed."""


def failure_of(error: BaseException) -> Failure | None:
    """Return why the process cannot survive this error; None if the error concerns only the work."""
    if _lacks_host_memory(error):
        return Failure.HOST_MEMORY
    return next(filter(None, map(_device_failure, _causes(error))), None)


def describe(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return str(error).partition("\n")[0].strip() or type(error).__name__


def _lacks_host_memory(error: BaseException) -> bool:
    if isinstance(error, ImportError):  # raised by the loader of a library; a missing module is no lack of memory
        return not isinstance(error, ModuleNotFoundError)
    is_torch = isinstance(error, RuntimeError)
    return isinstance(error, MemoryError) or (is_torch and _HOST_MEMORY_MESSAGE.match(str(error)) is not None)


def _device_failure(error: BaseException) -> Failure | None:
    types, message = {base.__name__ for base in type(error).__mro__}, str(error)
    if not isinstance(error, RuntimeError):  # all errors of torch and Triton are
        return None
    if types & _MEMORY_TYPES:
        return Failure.DEVICE_MEMORY
    if not types & _DEVICE_TYPES and _DEVICE_MESSAGE.match(message) is None:
        return None
    return Failure.DEVICE_MEMORY if _MEMORY_MESSAGE.search(message) else Failure.DEVICE


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, because compilers and loaders wrap device errors."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


class Startup:
    """Current phase of a startup, or why it failed. For the event loop, except the function that `reporter` returns."""

    def __init__(self) -> None:
        self._phase, self._failure = "starting", ""
        self._is_over = False
        self._changed = asyncio.Event()
        """Set on the next change, then replaced."""

    def reporter(self) -> Callable[[str], None]:
        """Return a function that logs and publishes a new phase, for any thread."""
        loop = asyncio.get_running_loop()

        def report(phase: str) -> None:
            log.info("%s", phase)
            loop.call_soon_threadsafe(self._enter, phase)

        return report

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._wake()

    def end(self, failure: str = "") -> None:
        """End every watch, after it has sent the failure, if any. Only the first call counts."""
        if not self._is_over:
            self._failure, self._is_over = failure[:MAX_FAILURE_CHARACTERS], True
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[tuple[str, str]]:
        """Yield the phase and the failure now and after each change. Slow readers may miss phases, but no failure."""
        sent = None
        while True:
            changed, current = self._changed, (self._phase, self._failure)
            if current != sent and (self._failure or not self._is_over):
                yield current
                sent = current
            elif self._is_over:
                return
            else:
                await changed.wait()
