"""Digests of the prefixes of a sequence, by which others find the cache of a common prefix. Pure."""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

# Prompts that share fewer tokens are prefilled in parallel, which is faster than waiting for the prefix.
BLOCK_TOKENS = 16
# Digested lengths grow by 1/32, in whole blocks, so that long prompts have few digests.
STRIDE = 32

Digest = bytes
"""Digest of all tokens up to some length; collision-resistant."""


class PrefixDigests:
    """Lengths in whole blocks, each with the digest of the tokens before it. Digests each token once."""

    def __init__(self) -> None:
        self._state = sha256()
        self._digests: list[tuple[int, Digest]] = []

    def up_to(self, token_ids: Sequence[int], length: int) -> Iterator[tuple[int, Digest]]:
        """Yield all lengths up to `length`, shortest first. `token_ids`: extends the tokens of earlier calls."""
        end = 0
        for end, digest in list(self._digests):
            if end > length:
                return
            yield end, digest
        while (begin := end) + (size := max(1, begin // STRIDE // BLOCK_TOKENS) * BLOCK_TOKENS) <= length:
            end = begin + size
            self._state.update(array("I", token_ids[begin:end]))
            self._digests.append((end, self._state.digest()))
            yield self._digests[-1]
