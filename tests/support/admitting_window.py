"""A window that admits its own sequences."""

from typing import Any

from coordinator.scheduling.admission import Admission
from coordinator.scheduling.capacity import QueueLimits
from coordinator.scheduling.request_queue import RequestQueue
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.window import Window


class AdmittingWindow(Window):
    """A window with its queue."""

    def __init__(
        self, max_num_seqs: int, queue: QueueLimits | RequestQueue, by_length: bool = False, **options: Any
    ) -> None:
        """`queue`: may be shared; limits make a new one with `by_length`. `options`: see `Window`."""
        self.queue = queue if isinstance(queue, RequestQueue) else RequestQueue(queue, by_length)
        super().__init__(max_num_seqs, self.queue, **options)

    def admit(self, limit: int | None = None) -> list[Sequence]:
        """Admit waiting sequences: see `Admission.admit`."""
        return Admission(self.queue, self).admit(limit)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is queued, runs, or holds a slot."""
        return self.queue.is_empty and not self.occupied
