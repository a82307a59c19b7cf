"""The target worker and its standby: a second worker with the same model, which takes over when the target is lost."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from coordinator.workers.errors import Cause, WorkerUnreachableError
from coordinator.workers.interface import Complete
from coordinator.workers.link import RENEWED
from coordinator.workers.states import LISTEN_SECONDS, LinkState
from coordinator.workers.target_link import TargetLink
from specpool.drafting.costs import StepTimes, Timed
from specpool.protocol.features import WantedFeatures
from specpool.protocol.rounds import Verdict, VerifyItem
from specpool.protocol.worker_info import WorkerInfo

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


class TargetPair:
    """A target with an optional standby. Only `active` serves rounds; the links change places when it is lost.

    The lost worker becomes the standby once it is back. It never takes over on its own.
    """

    def __init__(self, active: TargetLink, standby: TargetLink | None = None) -> None:
        self.active, self.standby = active, standby
        self.takeovers = 0
        """Number of times that the standby took over."""
        self.on_change: Callable[[], None] | None = None
        self._ready = asyncio.Event()
        active.on_change = self._changed
        if standby is not None:
            active.peer, standby.peer = standby, active
            standby.stand_by()
            standby.on_change = self._changed

    @property
    def links(self) -> list[TargetLink]:
        """The links to both workers, the active one first."""
        return [self.active, *([self.standby] if self.standby is not None else [])]

    @property
    def info(self) -> WorkerInfo | None:
        return self.active.info

    @property
    def instance_id(self) -> str:
        return self.active.instance_id

    @property
    def max_model_len(self) -> int:
        """Maximum positions of a sequence on either worker. Known once one was ready."""
        return min(link.info.max_model_len for link in self.links if link.info is not None)

    @property
    def step_times(self) -> StepTimes:
        return self.active.step_times

    @property
    def hosts_and_devices(self) -> frozenset[tuple[str, str]]:
        return self.active.hosts_and_devices

    def has_ended(self, instance_id: str) -> bool | None:
        """Whether another process has replaced this one at its address. None: unknown until its link is back."""
        links = [link for link in self.links if link.instance_id == instance_id]
        if any(link.is_ready for link in links):
            return False
        return None if links else True

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def release(self, sequence_ids: Iterable[int]) -> bool:
        return await self.active.release(sequence_ids)

    @property
    def grammar_refusal(self) -> str | None:
        return self.active.grammar_refusal

    async def verify(
        self,
        round_id: int,
        items: list[VerifyItem],
        traceparent: str,
        complete: Complete,
        may_join: bool,
        features: WantedFeatures | None,
    ) -> tuple[list[Verdict], Timed]:
        return await self.active.verify(round_id, items, traceparent, complete, may_join, features)

    async def check_rounds(self, instance_id: str) -> None:
        """Raise WorkerUnreachableError if the process that refused a round fails every round or has been replaced."""
        if self.instance_id != instance_id:
            raise WorkerUnreachableError("another target process took over", Cause.NOT_SENT)
        await self.active.check_rounds()

    def probes(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that probe the workers forever.

        They raise MismatchError if the active worker now runs another model, and the other one does not take over.
        """
        others = [] if self.standby is None else [self._keep_standby_connected(self.active, self.standby)]
        return [self.active.keep_connected(), *others]

    async def _keep_standby_connected(self, first: TargetLink, standby: TargetLink) -> None:
        """Connect to the standby after the target, which decides the model to serve, unless the target is down."""
        standby.reason = f"waiting for the target worker at {first.address}"
        clock = asyncio.get_running_loop().time
        deadline = clock() + LISTEN_SECONDS
        while first.info is None and (first.state is LinkState.LOADING or clock() < deadline):  # noqa: ASYNC110 - polls
            await asyncio.sleep(POLL_SECONDS)
        await standby.keep_connected()

    def _changed(self) -> None:
        is_lost = not self.active.is_ready and self.active.reason != RENEWED
        if is_lost and self.standby is not None and self.standby.is_ready:
            self._take_over(self.standby)
        if self.active.is_ready:
            self._ready.set()
        else:
            self._ready.clear()
        if self.on_change is not None:
            self.on_change()

    def _take_over(self, standby: TargetLink) -> None:
        lost, self.active, self.standby = self.active, standby, self.active
        self.takeovers += 1
        log.warning("the standby at %s takes over from the target worker at %s", standby.address, lost.address)
        standby.activate()
        lost.stand_by()
