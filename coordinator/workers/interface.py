"""The round loop's view of the two workers, implemented by the links."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from coordinator.drafting.costs import StepTimes
from coordinator.scheduling.counters import Timed
from specpool.protocol.rounds import Proposal, ProposeItem, Verdict, VerifyItem


class Worker(Protocol):
    """Either worker."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def step_times(self) -> StepTimes: ...
    @property
    def hosts_and_devices(self) -> frozenset[tuple[str, str]]: ...


class Target(Worker, Protocol):
    """The target worker."""

    @property
    def instance_id(self) -> str: ...
    async def wait_ready(self) -> None: ...
    async def release(self, sequence_ids: Iterable[int]) -> bool: ...
    async def verify(self, round_id: int, items: list[VerifyItem], traceparent: str) -> tuple[list[Verdict], Timed]: ...


class Draft(Worker, Protocol):
    """The draft worker."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def max_model_len(self) -> int: ...
    def release_soon(self, sequence_ids: Iterable[int]) -> None: ...
    async def propose(
        self, round_id: int, items: list[ProposeItem], chances: Iterable[float], step_cost: float, traceparent: str
    ) -> tuple[list[Proposal], Timed]: ...


@dataclass(frozen=True)
class Workers:
    """The workers of a coordinator. Without a draft worker, only prompt lookup drafts."""

    target: Target
    draft: Draft | None

    @property
    def ready_draft(self) -> Draft | None:
        return self.draft if self.draft is not None and self.draft.is_ready else None
