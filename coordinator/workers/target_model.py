"""The target's model, over all processes that serve it.

The first process decides the model. A sequence continues on another process only if fingerprints prove that it chooses
the same tokens.
"""

import asyncio
import re

from coordinator.workers.interface import MismatchError
from specpool.protocol.responses import InvalidResponseError
from specpool.protocol.worker_info import WorkerInfo

FIELDS = ("model", "tokenizer_fingerprint", "vocab_size", "parameters", "dtype", "max_model_len")
# `activations` come first: they explain a difference in numerics.
FINGERPRINTS = ("activations", "weights_fingerprint", "numerics_fingerprint")


class TargetModel:
    """The model that began the coordinator's sequences."""

    def __init__(self) -> None:
        self._info: WorkerInfo | None = None
        """The description of the current process."""
        self.reading_tokenizer = asyncio.Lock()
        """Held while a process's tokenizer is loaded: only that of the model in use may stay loaded."""

    @property
    def is_known(self) -> bool:
        return self._info is not None

    def check(self, info: WorkerInfo) -> None:
        """Raise MismatchError if a process runs a model that differs from the one in use.

        Raises InvalidResponseError without fingerprints. Only batch-invariant logits have one.
        """
        if not info.weights_fingerprint or (info.bitwise and not info.numerics_fingerprint):
            raise InvalidResponseError("a fingerprint is empty")
        if self._info is None:
            return
        before, now = _properties(self._info), _properties(info)
        # A larger max_model_len is fine: sequences in flight need fewer positions.
        now["max_model_len"] = min(info.max_model_len, self._info.max_model_len)
        for field in before:
            if before[field] != now[field]:
                reason = f"{field} was {before[field]}, is {now[field]}"
                raise MismatchError(f"the target worker would finish sequences in flight differently: {reason}")

    def replace(self, info: WorkerInfo) -> None:
        """Record the description of a new process, which has been checked."""
        self._info = info


def _properties(info: WorkerInfo) -> dict[str, object]:
    """Return the properties that decide the tokens of a sequence and whether it fits.

    Logits are bit-identical on devices of the same kind only. The device index does not matter.
    """
    return {
        **{field: getattr(info, field) for field in FIELDS},
        "device": re.sub(r":\d+", "", info.device, count=1),
        "equivalence": "bitwise" if info.bitwise else "numeric",
        **{field: getattr(info, field) for field in FINGERPRINTS},
    }
