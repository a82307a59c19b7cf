"""The interface between the host and a worker's model."""

from typing import Protocol

from specpool.protocol.rounds import RoundLimits
from specpool.protocol.worker_info import CacheLoad, WorkerInfo


class Backend(Protocol):
    """A worker's model, called on the model thread. Any thread may read the counters."""

    @property
    def realign_ns(self) -> int:
        """Nanoseconds spent on realignment so far."""

    @property
    def passes(self) -> int:
        """Forward passes so far."""

    @property
    def tokens(self) -> int:
        """Tokens that these passes have run."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum tokens of a forward pass."""

    def info(self) -> WorkerInfo:
        """Describe the model and its load. Called once, when the model is loaded."""

    @property
    def load(self) -> CacheLoad:
        """Return the load of the cache. Called after each work item, so it must take only microseconds."""

    @property
    def limits(self) -> RoundLimits:
        """Limits for the items of a round. Readable from any thread."""

    def release(self, coordinator_id: str, sequence_ids: list[int] | None) -> int:
        """Free sequences, or all of a coordinator; return how many held a slot."""

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Record that a coordinator is alive."""

    def orphan(self, coordinator_id: str) -> None:
        """Let a coordinator's sequences yield their slots until its lease is renewed."""

    def expire(self, now: float, lease_seconds: float) -> int:
        """Free the sequences of silent coordinators; return how many."""

    def shrink_passes(self) -> bool:
        """Free unused device memory and make passes smaller. Return False if they cannot be smaller."""
