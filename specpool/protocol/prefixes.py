"""Digests of pages: tokens and everything before them, by which sequences find the cached pages of a common prefix."""

from array import array
from collections.abc import Sequence
from hashlib import sha256

DIGEST_BYTES = 16
MAX_NAMESPACE_BYTES = 64
MAX_EVICTED_PAGES = 4096
"""Maximum number of evicted pages in a response."""


class PageDigests:
    """The digests of a sequence's full pages, each a function of all tokens up to its end. Digests each token once."""

    def __init__(self, namespace: bytes, page_size: int) -> None:
        """`namespace`: sequences of different namespaces have different digests. `page_size`: tokens of a page."""
        self._page_size = page_size
        self._digests = [_digest(namespace)]  # of the namespace, then of each page

    def first(self, count: int, token_ids: Sequence[int]) -> list[bytes]:
        """Return the digests of the first `count` pages. `token_ids`: those of earlier calls, and all that follow."""
        known, size = len(self._digests) - 1, self._page_size
        tokens = array("I", token_ids[known * size : count * size])
        assert len(tokens) >= (count - known) * size, "the page is not full"
        data, size = tokens.tobytes(), size * tokens.itemsize
        for start in range(0, len(data), size):
            self._digests.append(_digest(self._digests[-1] + data[start : start + size]))
        return self._digests[1 : count + 1]

    def truncate(self, count: int) -> None:
        """Forget all but the first `count` pages: others follow them now."""
        del self._digests[count + 1 :]


def _digest(data: bytes) -> bytes:
    return sha256(data).digest()[:DIGEST_BYTES]
