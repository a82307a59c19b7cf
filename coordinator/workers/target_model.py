"""The target's model, over all processes that serve it.

The first process decides the model. A sequence may only continue on another process if fingerprints prove that it
chooses the same tokens.
"""

import asyncio
import re
from collections.abc import Sequence
from itertools import count

from coordinator.workers.errors import MismatchError
from specpool.protocol.worker_info import WorkerInfo

FINGERPRINTS = ("weights_fingerprint", "numerics_fingerprint")
# Compared only if both processes report them. `activations` comes first: it explains a difference in numerics.
OPTIONAL = ("activations", *FINGERPRINTS)

Texts = dict[str, str]


class TargetModel:
    """The model that began the coordinator's sequences."""

    def __init__(self) -> None:
        self._info: WorkerInfo | None = None
        """The model of the current process."""
        self._known: Texts = {}
        """Optional properties of all processes so far."""
        self.reading_tokenizer = asyncio.Lock()
        """Held while a process's tokenizer is loaded: only that of the model in use may stay loaded."""
        self._unproven = count(1)

    @property
    def is_known(self) -> bool:
        return self._info is not None

    def check(self, info: WorkerInfo) -> None:
        """Raise MismatchError if a process runs a model that differs from the one in use."""
        if self._info is None:
            return
        before, now = _properties(self._info) | self._known, _properties(info) | _reported(info, OPTIONAL)
        # A larger max_model_len is fine: sequences in flight have reserved fewer positions.
        now["max_model_len"] = min(info.max_model_len, self._info.max_model_len)
        for field in before:
            if field in now and before[field] != now[field]:
                reason = f"{field} was {before[field]}, is {now[field]}"
                raise MismatchError(f"the target worker would finish sequences in flight differently: {reason}")

    def replace(self, info: WorkerInfo) -> str:
        """Record the model of a new process. Return its numerics: equal ones prove that processes choose alike."""
        self._info = info
        self._known |= _reported(info, OPTIONAL)
        if not _proves(info):
            return f"unproven {next(self._unproven)}"
        return " ".join(f"{name}={value}" for name, value in _reported(info, FINGERPRINTS).items())


def _proves(info: WorkerInfo) -> bool:
    """Whether the fingerprints determine the tokens. Only batch-invariant logits have a fingerprint."""
    return bool(info.weights_fingerprint and (info.numerics_fingerprint or not info.bitwise))


def _reported(info: WorkerInfo, fields: Sequence[str]) -> Texts:
    return {field: getattr(info, field) for field in fields if getattr(info, field)}


def _properties(info: WorkerInfo) -> dict[str, object]:
    """Return the properties that decide the tokens of a sequence and whether it fits.

    Logits are bit-identical on devices of the same kind only. The device index does not matter.
    """
    fields = ("model", "tokenizer_fingerprint", "vocab_size", "parameters", "dtype", "max_model_len")
    return {
        **{field: getattr(info, field) for field in fields},
        "device": re.sub(r":\d+", "", info.device, count=1),
        "equivalence": "bitwise" if info.bitwise else "numeric",
    }
