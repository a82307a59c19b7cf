"""Frees the slots of sequences that have left."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from coordinator.workers.interface import Workers
from specpool.drafting.drafting import Drafting

RETRY_SECONDS = 0.05


class Releasing:
    """Releases slots in both workers."""

    def __init__(self, workers: Workers, drafting: Drafting) -> None:
        self.drafting_ahead: set[asyncio.Task[None]] = set()
        """Calls to the draft worker that could take slots again."""
        self._workers, self._drafting = workers, drafting
        self._releasing: set[asyncio.Future[Any]] = set()

    async def release(self, sequence_ids: set[int]) -> None:
        """Free the slots of sequences. Return once the target worker has confirmed."""
        self._drafting.forget(sequence_ids)
        self._start(self._release_drafts(sequence_ids))
        while not await self._workers.target.release(sequence_ids):  # noqa: ASYNC110 - polls a remote worker
            await asyncio.sleep(RETRY_SECONDS)

    def abandon(self, sequence_ids: set[int]) -> None:
        """Free the slots of sequences that continue on another target worker, as soon as the workers can."""
        self._drafting.forget(sequence_ids)
        self._start(self._release_drafts(sequence_ids))
        self._start(self._workers.target.release(sequence_ids))

    def _start(self, release: Awaitable[Any]) -> None:
        self._releasing.add(releasing := asyncio.ensure_future(release))
        releasing.add_done_callback(self._releasing.discard)

    async def _release_drafts(self, sequence_ids: set[int]) -> None:
        if self.drafting_ahead:
            await asyncio.wait(set(self.drafting_ahead))
        if self._workers.draft is not None:
            self._workers.draft.release_soon(sequence_ids)
