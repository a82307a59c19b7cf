"""The capacity of the target worker's KV cache, as the pool admits sequences by it. Pure."""

from dataclasses import dataclass

from coordinator.scheduling.sequence import Sequence


@dataclass(frozen=True)
class KVCapacity:
    """Positions that the target worker can cache for all sequences together."""

    positions: int = 0
    """0: any number."""
    multiple: int = 1
    """The positions of each sequence are rounded up to a multiple of this."""

    def taken_by(self, sequence: Sequence) -> int:
        """Positions that are kept for a sequence."""
        multiple = max(1, self.multiple)
        return -(-sequence.max_length // multiple) * multiple
