"""Registry of draft models, identified by the operator's name and the weights."""

import logging
from collections.abc import Iterable

from specpool.drafting.draft_models import DraftKey, DraftModel
from specpool.protocol.worker_info import WorkerInfo, readable_name

log = logging.getLogger(__name__)

MAX_DRAFTS = 8
"""Maximum number of draft models. Bounds the values of the metric label `draft`."""
FINGERPRINT_DIGITS, MAX_NAME_CHARACTERS = 8, 64


class DraftRegistry:
    """Draft models, including some without workers: the workers may come back."""

    def __init__(self) -> None:
        self._models: dict[DraftKey, DraftModel] = {}
        self._has_refused = False

    @property
    def models(self) -> list[DraftModel]:
        """All known models, the oldest first."""
        return [*self._models.values()]

    def update(self, workers: Iterable[tuple[str, WorkerInfo]]) -> list[DraftModel | None]:
        """Return the model of each worker, or None if there are too many models.

        `workers`: the operator's name, which may be empty, and the worker's info.
        """
        described = [((label, info.weights_fingerprint or info.model), info) for label, info in workers]
        used = {key for key, _ in described}
        for key, info in described:
            if key not in self._models and self._make_room(used, key):
                self._models[key] = DraftModel(key, model=info.model)
        self._name(used)
        return [self._models.get(key) for key, _ in described]

    def _make_room(self, used: set[DraftKey], new: DraftKey) -> bool:
        """Forget the oldest model without workers if the registry is full. Return whether there is room."""
        if len(self._models) < MAX_DRAFTS:
            return True
        unused = next((key for key in self._models if key not in used), None)
        if unused is None:
            if not self._has_refused:
                log.warning("more than %d drafts; ignoring the workers with weights %s", MAX_DRAFTS, new[1])
            self._has_refused = True
            return False
        del self._models[unused]
        return True

    def _name(self, used: set[DraftKey]) -> None:
        """Give the models unique names. Of models with the same name, the oldest with workers keeps it."""
        taken: dict[str, DraftModel] = {}
        for model in sorted(self._models.values(), key=lambda model: model.key not in used):
            label, fingerprint = model.key
            base = name = (label or readable_name(model.model))[:MAX_NAME_CHARACTERS]
            number = 1
            while name in taken:
                name = f"{base} ({fingerprint[:FINGERPRINT_DIGITS]}{f'-{number}' if number > 1 else ''})"
                number += 1
            taken[name] = model
            if name != base and name != model.name and model.key in used:
                other = taken[base].key[1]
                log.warning(
                    "draft workers named %s have different weights (%s and %s); treating the latter as draft %s",
                    *(base, other, fingerprint, name),
                )
            model.name = name
