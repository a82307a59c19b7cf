"""Index of the tokens of a prediction, shared by the samples of a request. Pure."""

from bisect import bisect_left
from collections.abc import Sequence as Items

# Tokens to index per call. A long prediction must not stall a round.
TOKENS_PER_CALL = 2048
# Indexed tokens at the start of a prediction, to bound memory. Answers can follow the rest, but not resume there.
MAX_INDEXED = 32_768
# Occurrences of a token to return around each of two places.
MAX_OCCURRENCES = 10


class PredictionIndex:
    def __init__(self, prediction: Items[int]) -> None:
        self.prediction = prediction
        self._places: dict[int, list[int]] = {}
        """Places after each occurrence, by token."""
        self._num_indexed = 0

    def index_some(self) -> None:
        """Index at most `TOKENS_PER_CALL` tokens."""
        start = self._num_indexed
        self._num_indexed = min(len(self.prediction), MAX_INDEXED, start + TOKENS_PER_CALL)
        for at in range(start, self._num_indexed):
            self._places.setdefault(self.prediction[at], []).append(at + 1)

    def places(self, token: int, near: int, also_near: int) -> list[int]:
        """Return places after occurrences of a token, the closest to two expected places. `near` must come first."""
        places = self._places.get(token, [])
        if len(places) <= 2 * MAX_OCCURRENCES:
            return places
        first, second = (max(0, bisect_left(places, at) - MAX_OCCURRENCES // 2) for at in (near, also_near))
        second = max(second, first + MAX_OCCURRENCES)
        return places[first : first + MAX_OCCURRENCES] + places[second : second + MAX_OCCURRENCES]
