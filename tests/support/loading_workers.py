"""Fake workers that report the phases of a startup."""

from collections.abc import AsyncIterator
from typing import Any

from specpool.testing import FakeDraft, FakeTarget, FakeWorker
from specpool.v1 import common_pb2
from specpool.worker.backend import Startup


class _Loading(FakeWorker):
    """Reports phases from each start on, until it is ready or fails."""

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self.loading = True
        self._startup = Startup()
        self.report = self._startup.reporter()
        return await super().start(address)

    async def loaded(self) -> None:
        await super().loaded()
        self._startup.end()

    async def fail(self, reason: str) -> None:
        """Report the failure, and exit once the coordinator has been told."""
        self._startup.end(reason)
        assert self._server is not None
        await self._server.stop(60)

    async def WatchStartup(self, request: Any, context: Any) -> AsyncIterator[common_pb2.WatchStartupResponse]:
        async for phase, failure in self._startup.watch():
            yield common_pb2.WatchStartupResponse(phase=phase, failure=failure)


class LoadingTarget(_Loading, FakeTarget):
    """A target that loads."""


class LoadingDraft(_Loading, FakeDraft):
    """A draft that loads."""
