"""The coordinator's link to a draft worker, on its own thread and with a blocking interface."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from coordinator.workers.draft_link import WARMUP_ROUNDS, DraftLink
from coordinator.workers.interface import MismatchError
from coordinator.workers.states import LinkState
from specpool.drafting.costs import Timed
from specpool.protocol.responses import InvalidResponseError
from specpool.protocol.rounds import Proposal, ProposeItem
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import WorkerInfo
from specpool.rpc.security.channel import Connector
from specpool.vllm.drafter import DraftModel

# Timeout of a step's drafts: the maximum of vLLM's step, this factor times the expected time, and these seconds.
TIMEOUT_FACTOR, MIN_TIMEOUT_SECONDS = 4, 0.05
# Extra time for the thread to answer after the deadline of a call, and to close.
GRACE_SECONDS = 1.0
# Without a step for this long, vLLM has no rows: release their slots for other clients.
IDLE_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """vLLM's model, as a `DraftLink` compares it with the draft."""

    info: WorkerInfo
    tokenizer_files: TokenizerFiles | None = None
    """The target's tokenizer. None: refuse drafts with another tokenizer."""

    async def wait_ready(self) -> None:
        """Return at once."""


class RemoteDraftLink(DraftLink):
    """A link whose timeouts follow the duration of vLLM's steps."""

    step_seconds = 0.0
    """Duration of vLLM's last step."""
    _num_served = 0

    async def propose(self, *arguments: Any, **more: Any) -> tuple[list[Proposal], Timed]:
        answer = await super().propose(*arguments, **more)
        self._num_served += 1
        return answer

    async def release_all(self) -> None:
        """Free all sequences, even if the link is backing off: it may close before the worker is ready again."""
        with suppress(TimeoutError, grpc.aio.AioRpcError, InvalidResponseError):
            async with asyncio.timeout(GRACE_SECONDS / 2):
                await self._release_all(self.instance_id)

    def _timeout_of(self, items: list[ProposeItem]) -> float:
        # Count over all connections: a worker that hangs repeatedly must not get the full timeout after each backoff.
        if self._num_served < WARMUP_ROUNDS:
            return self._timeout
        minimum = max(MIN_TIMEOUT_SECONDS, self.step_seconds)
        return min(self._timeout, max(minimum, TIMEOUT_FACTOR * self._expected_seconds(items)))


class BlockingDraftLink:
    """The link to the draft worker, for one calling thread. Only `start` and `propose` raise or wait."""

    def __init__(self, connector: Connector, coordinator_id: str, timeout_seconds: float, target: ServedModel) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specpool-draft", daemon=True)
        self._thread.start()
        self._timeout = timeout_seconds
        self._link = self._wait(self._make(connector, coordinator_id, timeout_seconds, target), None)
        self._connecting: asyncio.Future[None] | None = None
        self._held: set[int] = set()
        self._idle: asyncio.TimerHandle | None = None

    @staticmethod
    async def _make(*arguments: Any) -> RemoteDraftLink:
        return RemoteDraftLink(*arguments)

    def start(self, seconds: float) -> None:
        """Wait until the draft worker is ready. MismatchError if it must not be used; TimeoutError with the reason."""
        self._wait(self._start(seconds), None)

    async def _start(self, seconds: float) -> None:
        link = self._link
        changed = asyncio.Event()
        link.on_change = changed.set
        self._connecting = asyncio.ensure_future(link.keep_connected())
        try:
            async with asyncio.timeout(seconds):
                while not link.is_ready and link.state is not LinkState.REFUSED:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            raise TimeoutError(f"no answer in {seconds:g} s: {link.reason}") from None
        finally:
            link.on_change = None
        if link.state is LinkState.REFUSED:
            raise MismatchError(link.reason)

    @property
    def model(self) -> DraftModel | None:
        """The draft worker's model; None while it is unavailable."""
        link = self._link
        if not link.is_ready or link.info is None:
            return None
        return DraftModel(link.info, link.step_times)

    def propose(
        self, round_id: int, items: list[ProposeItem], hints: tuple[list[float], float], step_seconds: float
    ) -> tuple[list[Proposal], Timed]:
        """Get a round's proposals; raises like `DraftLink.propose`. `step_seconds`: duration of vLLM's last step."""
        began = time.perf_counter()
        self._link.step_seconds = step_seconds
        proposals, timed = self._wait(self._propose(round_id, items, hints), self._timeout + GRACE_SECONDS)
        return proposals, replace(timed, elapsed=time.perf_counter() - began)

    async def _propose(
        self, round_id: int, items: list[ProposeItem], hints: tuple[list[float], float]
    ) -> tuple[list[Proposal], Timed]:
        self._held.update(item.sequence_id for item in items)
        if self._idle is not None:
            self._idle.cancel()
        self._idle = self._loop.call_later(IDLE_SECONDS, lambda: self._release([*self._held]))
        return await self._link.propose(round_id, items, *hints)

    def release(self, sequence_ids: list[int]) -> None:
        """Release sequences in the background."""
        if sequence_ids:
            self._loop.call_soon_threadsafe(self._release, sequence_ids)

    def _release(self, sequence_ids: list[int]) -> None:
        if released := self._held.intersection(sequence_ids):
            self._held -= released
            self._link.release_soon(released)

    def close(self) -> None:
        """Release all sequences if the draft worker is reachable, and end the thread."""
        try:
            self._wait(self._close(), GRACE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    async def _close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if not await self._link.release(self._held):
            await self._link.release_all()
        await self._link.close()

    def _wait(self, work: Coroutine[Any, Any, T], seconds: float | None) -> T:
        """Run a coroutine on the thread and return its result. TimeoutError after `seconds`."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise
