"""Classes that the benchmark has vLLM load: one that never drafts, and `RemoteDraft` with a clock."""

import copy
import time
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.drafting.costs import StepTimes
from coordinator.scheduling.counters import Timed
from specpool.protocol.rounds import Proposal, ProposeItem
from specpool.vllm.link import BlockingDraftLink
from specpool.vllm.remote_draft import RemoteDraft


class NoDrafts:
    """What it costs vLLM to be ready for drafts: there are none."""

    def __init__(self, vllm_config: Any) -> None:
        """Takes what vLLM passes."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """Loads nothing."""

    def propose(self, sampled_token_ids: Any, *_: Any, **__: Any) -> list[list[int]]:
        """No draft tokens for each row."""
        return [[] for _ in sampled_token_ids]


@dataclass
class Clock:
    """Sums over the steps of this process."""

    asked: int = 0
    """Steps before which the draft worker was asked."""
    waited: float = 0.0
    """Seconds that vLLM waited for its answers."""
    passes: float = 0.0
    """Seconds of them in which the draft worker computed."""
    alone: float = 0.0
    """Seconds that the same passes took it when it measured itself, before vLLM was there."""


CLOCK = Clock()


def clock() -> dict[str, float]:
    """The sums so far."""
    return asdict(CLOCK)


class TimedRemoteDraft(RemoteDraft):
    """`RemoteDraft`, with a clock on its link."""

    def __init__(self, vllm_config: Any) -> None:
        """As `RemoteDraft`."""
        super().__init__(vllm_config)
        if self._link is not None and self._link.model is not None:
            self._at_start = copy.deepcopy(self._link.model.step_times)

    def _propose(self, link: Any, batch: Any, step_seconds: float) -> list[list[int]]:
        return super()._propose(_TimedLink(link, self._at_start), batch, step_seconds)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _TimedLink:
    """A link whose proposals are timed."""

    link: BlockingDraftLink
    at_start: StepTimes

    def propose(self, round_id: int, items: list[ProposeItem], *more: Any) -> tuple[list[Proposal], Timed]:
        began = time.perf_counter()
        CLOCK.asked += 1
        try:
            proposals, timed = self.link.propose(round_id, items, *more)
        finally:
            CLOCK.waited += time.perf_counter() - began
        lengths = [len(proposal.draft_token_ids) for proposal in proposals]
        later = [sum(length > step for length in lengths) for step in range(1, max(lengths, default=0))]
        CLOCK.passes += timed.forward
        CLOCK.alone += sum(map(self.at_start, [sum(len(item.token_ids) for item in items), *later]))
        return proposals, timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)
