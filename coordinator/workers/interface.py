"""The workers as the rest of the coordinator sees them, and the errors of calls to them. The links implement this."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from specpool.drafting.costs import StepTimes, Timed
from specpool.drafting.draft_models import DraftModel
from specpool.protocol.features import FeatureSpec, WantedFeatures
from specpool.protocol.rounds import Proposal, ProposeItem, Verdict, VerifyItem
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import WorkerInfo


class Cause(Enum):
    """Why a call failed."""

    NOT_SENT = auto()
    """The worker was unreachable before the call was sent."""
    LOST = auto()
    """The connection or the worker was lost during the call. If the worker has restarted, the call may have crashed
    it."""
    FAILED = auto()
    """The worker hung or sent an invalid response. The call may be the reason."""


class WorkerUnreachableError(Exception):
    """A worker sent no valid response in time."""

    def __init__(self, reason: str, cause: Cause) -> None:
        super().__init__(reason)
        self.cause = cause


class WorkerRefusedError(Exception):
    """A worker's handler returned an error."""


class MismatchError(Exception):
    """A worker runs a model that does not match the one in use."""


class UnusableModelError(MismatchError):
    """The target worker's model cannot be served, and retrying does not help."""


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
    @property
    def tokenizer_files(self) -> TokenizerFiles | None: ...
    def has_ended(self, instance_id: str) -> bool | None: ...
    @property
    def draft_step_times(self) -> StepTimes: ...
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
        hints: tuple[Iterable[float], float],
    ) -> tuple[list[Verdict], Timed]: ...
    async def check_rounds(self, instance_id: str) -> None: ...


class Roster(Protocol):
    """The draft models of the draft workers, such as `coordinator.workers.draft_roster.DraftRoster`."""

    @property
    def models(self) -> list[DraftModel]: ...
    def limits(self, model: DraftModel | None) -> WorkerInfo | None: ...
    @property
    def max_branches(self) -> int: ...
    @property
    def features(self) -> FeatureSpec | None: ...


class Draft(Worker, Protocol):
    """The draft workers, such as `coordinator.workers.draft_group.DraftGroup`."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def roster(self) -> Roster: ...
    def release_soon(self, sequence_ids: Iterable[int]) -> None: ...
    async def propose(
        self,
        round_id: int,
        items: list[ProposeItem],
        models: Mapping[int, DraftModel | None],
        step_cost: float,
        traceparent: str,
        slack: float,
    ) -> tuple[list[Proposal], Timed]: ...


@dataclass(frozen=True)
class Workers:
    """The target, and the draft workers as one. Without a draft model, only prompt lookup drafts."""

    target: Target
    draft: Draft | None

    @property
    def own_draft(self) -> WorkerInfo | None:
        """The draft that the target worker carries, if any. It replaces the draft workers."""
        return self.target.info.draft if self.target.info is not None else None

    @property
    def ready_draft(self) -> Draft | None:
        """The draft worker, if it drafts for this target, and calls to it are likely to succeed."""
        if self.draft is None or self.own_draft is not None:
            return None
        return self.draft if self.draft.is_ready else None
