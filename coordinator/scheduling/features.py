"""Features of a sequence on their way from the target worker to the draft worker. Pure.

Nothing depends on them but the quality of drafts. A position's states never change, so none is ever out of date.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from specpool.protocol.features import MAX_FEATURE_BYTES, WantedFeatures
from specpool.protocol.rounds import MAX_LOOKUP_TOKENS, ProposeItem, VerifyItem

MAX_STORED_BYTES = 4 * 2**20
"""Maximum bytes of the states that are kept for a sequence."""


class FeatureStore:
    """States of a sequence's last cached positions.

    Those that the draft worker has read stay, because it may lose its cache.
    """

    def __init__(self, wanted: WantedFeatures) -> None:
        self.spec = wanted.spec
        limit = max(1, MAX_STORED_BYTES // self.spec.row_bytes)
        self._rows: deque[bytes] = deque(maxlen=min(limit, wanted.window + MAX_LOOKUP_TOKENS))
        self._end = self._num_read = 0
        """Position after the last one with a state, and after the last one that the draft worker has read."""

    @property
    def first(self) -> int:
        """The first position with a state."""
        return self._end - len(self._rows)

    @property
    def first_unread(self) -> int:
        """The first position with a state that the draft worker has not read."""
        return max(self.first, self._num_read)

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

    def mark_read(self, end: int) -> None:
        """Note that the draft worker has read the states before the tokens up to `end`."""
        self._num_read = max(self._num_read, end - 1)

    def mark_lost(self) -> None:
        """Note that the draft worker has lost its cache."""
        self._num_read = 0


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
