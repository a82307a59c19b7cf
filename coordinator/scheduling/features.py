"""Features of a sequence on their way from the target worker to the draft worker. Pure.

Nothing depends on them but the quality of drafts. A position's states never change, so none is ever out of date.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from specpool.protocol.features import MAX_FEATURE_BYTES, WantedFeatures
from specpool.protocol.rounds import MAX_DRAFT_TOKENS, ProposeItem, VerifyItem


class FeatureStore:
    """States of a sequence's last cached positions that the draft worker has not read yet."""

    def __init__(self, wanted: WantedFeatures) -> None:
        self.spec = wanted.spec
        self._rows: deque[bytes] = deque(maxlen=wanted.window + MAX_DRAFT_TOKENS)
        self._end = 0
        """Position after the last one with a state."""

    @property
    def first(self) -> int:
        """The first position with a state."""
        return self._end - len(self._rows)

    def add(self, features: bytes, end: int) -> None:
        """Add the states of the last positions before `end`."""
        size = self.spec.row_bytes
        rows = [features[at : at + size] for at in range(0, len(features), size)]
        if end - len(rows) != self._end:
            self._rows.clear()
        self._rows.extend(rows)
        self._end = end

    def is_due(self, length: int) -> bool:
        """Whether the states reach as far as `length` tokens of the sequence need."""
        return bool(self._rows) and self._end == length - 1

    def before(self, begin: int, end: int) -> bytes:
        """The states of the positions before the last tokens of [`begin`, `end`). Requires `is_due`."""
        first = max(begin - 1, self.first)
        return b"".join(islice(self._rows, first - self.first, max(0, end - 1 - self.first)))

    def read(self, end: int) -> None:
        """Drop the states before the tokens up to `end`, which the draft worker has read."""
        while self._rows and self.first < end - 1:
            self._rows.popleft()


def limit_verify_items(items: Iterable[VerifyItem], wanted: WantedFeatures) -> None:
    """Ask for no more features than fit in a response."""
    room = MAX_FEATURE_BYTES // wanted.spec.row_bytes
    for item in items:
        if item.want_features:
            rows = min(wanted.window, max(1, len(item.token_ids))) + item.max_num_draft_tokens
            item.want_features = rows <= room
            room -= rows if item.want_features else 0


def limit_propose_items(items: Iterable[ProposeItem]) -> None:
    """Send no more features than fit in a request."""
    room = MAX_FEATURE_BYTES
    for item in items:
        if len(item.features) > room:
            item.features = b""
        room -= len(item.features)
