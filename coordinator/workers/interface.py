"""The workers as the rest of the coordinator sees them; the links implement these protocols."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from specpool.drafting.costs import StepTimes, Timed
from specpool.protocol.features import WantedFeatures
from specpool.protocol.rounds import Proposal, ProposeItem, Verdict, VerifyItem
from specpool.protocol.worker_info import WorkerInfo

Complete = Callable[[], Awaitable[None]]
"""Completes the items of a round that was sent ahead, once the earlier rounds have committed."""


class Worker(Protocol):
    """Either worker."""

    @property
    def step_times(self) -> StepTimes: ...
    @property
    def hosts_and_devices(self) -> frozenset[tuple[str, str]]: ...


class Target(Worker, Protocol):
    """The target worker, such as `coordinator.workers.target_link.TargetLink`."""

    @property
    def info(self) -> WorkerInfo | None: ...
    @property
    def instance_id(self) -> str: ...
    def has_ended(self, instance_id: str) -> bool | None: ...
    async def wait_ready(self) -> None: ...
    async def release(self, sequence_ids: Iterable[int]) -> bool: ...
    @property
    def grammar_refusal(self) -> str | None: ...
    async def verify(
        self,
        round_id: int,
        items: list[VerifyItem],
        traceparent: str,
        complete: Complete,
        may_join: bool,
        features: WantedFeatures | None,
    ) -> tuple[list[Verdict], Timed]: ...
    async def check_rounds(self, instance_id: str) -> None: ...


class Draft(Worker, Protocol):
    """The draft worker, such as `DraftLink`, or several, as `coordinator.workers.draft_group.DraftGroup`."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def info(self) -> WorkerInfo: ...
    def release_soon(self, sequence_ids: Iterable[int]) -> None: ...
    async def propose(
        self, round_id: int, items: list[ProposeItem], chances: Iterable[float], step_cost: float, traceparent: str
    ) -> tuple[list[Proposal], Timed]: ...


@dataclass(frozen=True)
class Workers:
    """The target, and the draft workers as one. Without a draft worker, only prompt lookup drafts."""

    target: Target
    draft: Draft | None

    @property
    def ready_draft(self) -> Draft | None:
        """The draft worker, if calls to it are likely to succeed."""
        return self.draft if self.draft is not None and self.draft.is_ready else None
