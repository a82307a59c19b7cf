"""The draft models of a group of workers: which are ready, what they can do, and how long their steps take."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from coordinator.workers.draft_link import DraftLink
from coordinator.workers.draft_registry import DraftRegistry
from coordinator.workers.link import RENEWED
from specpool.drafting.costs import UNKNOWN_DRAFT, StepTimes
from specpool.drafting.draft_models import DraftModel
from specpool.protocol.features import FeatureSpec
from specpool.protocol.worker_info import WorkerInfo

SHARE_STEPS = 8
"""Precision of the share of a round's rows that a draft's workers run, for step times."""


class DraftRoster:
    """Assigns a draft model to each link, and describes the models with ready workers."""

    def __init__(self, links: Callable[[], Iterable[DraftLink]]) -> None:
        """`links`: returns those to all draft workers."""
        self._links, self._registry = links, DraftRegistry()
        self._described: list[tuple[DraftLink, WorkerInfo]] = []
        """Descriptions of the workers, from which their models follow."""
        self._workers: dict[DraftModel, list[tuple[WorkerInfo, StepTimes]]] = {}
        """The ready workers of each model, from which `_limits` follow."""
        self._limits: dict[DraftModel, WorkerInfo] = {}
        self._shared_times = StepTimes(UNKNOWN_DRAFT)
        self._lead: tuple[list[StepTimes], int] = [], 0
        """Workers and share of rows from which `_shared_times` were computed."""

    @property
    def known_models(self) -> list[DraftModel]:
        """All models, including those whose workers are away."""
        self._identify()
        return self._registry.models

    @property
    def models(self) -> list[DraftModel]:
        """Models with a ready worker."""
        self._identify()
        workers: dict[DraftModel, list[tuple[WorkerInfo, StepTimes]]] = {}
        for link in self._links():
            is_up = link.is_ready or link.reason == RENEWED
            if is_up and link.model is not None and link.info is not None:
                workers.setdefault(link.model, []).append((link.info, link.step_times))
        if workers != self._workers:
            self._workers = workers
            self._limits = {model: _limits([info for info, _ in ready]) for model, ready in workers.items()}
            for model, limits in self._limits.items():
                times = [times for _, times in workers[model]]
                model.max_model_len, model.max_branches = limits.max_model_len, limits.max_branches
                model.features = limits.features
                model.step_times = times[0] if len(times) == 1 else StepTimes.in_parallel(times)
        return [*workers]

    def _identify(self) -> None:
        """Find out the model of each worker, after one has described itself."""
        described = [(link, link.info) for link in self._links() if link.info is not None]
        if described != self._described:
            models = self._registry.update((link.label, info) for link, info in described)
            for (link, _), model in zip(described, models, strict=True):
                link.model = model
            self._described = described

    def limits(self, model: DraftModel | None) -> WorkerInfo | None:
        """What all ready workers of a model can do. None if none is ready, or without a model."""
        return self._limits.get(model) if model is not None else None

    @property
    def max_branches(self) -> int:
        """Maximum branches of a sequence, of any model."""
        return max((model.max_branches for model in self.models), default=0)

    @property
    def features(self) -> FeatureSpec | None:
        """The hidden states that drafts read. None if two drafts read different ones."""
        specs = {model.features for model in self.models if model.features is not None}
        return specs.pop() if len(specs) == 1 else None

    def step_times(self, count: Callable[[DraftLink], int]) -> StepTimes:
        """Times of steps, by rows of the whole round. A new object whenever a worker is new.

        The draft with the most sequences decides, since rounds do not wait long for others. `count`: of the sequences
        of a worker.
        """
        counts = dict.fromkeys(self.models, 0)
        if len(counts) <= 1:
            return next((model.step_times for model in counts), self._shared_times)
        for link in self._links():
            if link.model in counts:
                counts[link.model] += count(link)
        lead = max(counts, key=counts.__getitem__)
        times = [times for _, times in self._workers[lead]]
        steps = round(SHARE_STEPS * counts[lead] / max(1, sum(counts.values()))) or SHARE_STEPS
        if (times, steps) != self._lead:
            self._lead, self._shared_times = (times, steps), StepTimes.in_parallel(times, steps / SHARE_STEPS)
        return self._shared_times


def _limits(infos: Sequence[WorkerInfo]) -> WorkerInfo:
    """What all workers with the same weights can do."""
    return replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        max_branches=min(info.max_branches for info in infos),
    )
