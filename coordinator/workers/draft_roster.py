"""Draft models of a group of workers, with their readiness, limits and step times."""

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
"""Steps to which the lead draft's share of a round's rows is rounded, so that step times rarely change."""


class DraftRoster:
    """Assigns a draft model to each link, and describes the models with ready workers."""

    def __init__(self, links: Callable[[], Iterable[DraftLink]]) -> None:
        """`links`: returns the links to all draft workers."""
        self._links, self._registry = links, DraftRegistry()
        self._described: list[tuple[DraftLink, WorkerInfo]] = []
        """Worker descriptions as of the last identification of their models."""
        self._workers: dict[DraftModel, list[tuple[WorkerInfo, StepTimes]]] = {}
        """Ready workers of each model as of the last update of `_limits`."""
        self._limits: dict[DraftModel, WorkerInfo] = {}
        self._shared_times = StepTimes(UNKNOWN_DRAFT)
        self._lead: tuple[list[StepTimes], int] = [], 0
        """Workers and share of rows as of the last update of `_shared_times`."""

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
        """Update the model of each worker if any description has changed."""
        described = [(link, link.info) for link in self._links() if link.info is not None]
        if described != self._described:
            models = self._registry.update((link.label, info) for link, info in described)
            for (link, _), model in zip(described, models, strict=True):
                link.model = model
            self._described = described

    def limits(self, model: DraftModel | None) -> WorkerInfo | None:
        """Return the common limits of a model's ready workers. None if no worker is ready or `model` is None."""
        return self._limits.get(model) if model is not None else None

    @property
    def max_branches(self) -> int:
        """Maximum branches of a sequence, of any model."""
        return max((model.max_branches for model in self.models), default=0)

    @property
    def features(self) -> FeatureSpec | None:
        """Hidden states that drafts read. None if no draft reads any, or two drafts read different ones."""
        specs = {model.features for model in self.models if model.features is not None}
        return specs.pop() if len(specs) == 1 else None

    def step_times(self, count: Callable[[DraftLink], int]) -> StepTimes:
        """Return step times by rows of the whole round, as a new object after any change of workers.

        Only the draft with the most sequences counts, because rounds do not wait long for others. `count`: returns the
        number of sequences on a worker.
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
    """Return the common limits of workers with the same weights."""
    return replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        max_branches=min(info.max_branches for info in infos),
    )
