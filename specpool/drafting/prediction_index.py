"""Where each token occurs in a prediction. The samples of a request share the index. Pure."""

from bisect import bisect_left
from collections.abc import Sequence as Items

# Tokens of a prediction to index per call. A long one must not stall a round.
TOKENS_PER_CALL = 2048
# Leading tokens of a prediction to index. It bounds the memory. Answers can follow the rest, but not resume there.
MAX_INDEXED = 32_768
# Occurrences of a token to return around each of two places.
MAX_OCCURRENCES = 10


class PredictionIndex:
    def __init__(self, prediction: Items[int]) -> None:
        self.prediction = prediction
        self._places: dict[int, list[int]] = {}
        """By token: the places after its occurrences."""
        self._num_indexed = 0

    def index_some(self) -> None:
        """Index at most `TOKENS_PER_CALL` tokens."""
        start = self._num_indexed
        self._num_indexed = min(len(self.prediction), MAX_INDEXED, start + TOKENS_PER_CALL)
        for at in range(start, self._num_indexed):
            self._places.setdefault(self.prediction[at], []).append(at + 1)

    def places(self, token: int, near: int, also_near: int) -> list[int]:
        """Places after occurrences of a token, those closest to two expected ones, of which `near` is the first."""
        places = self._places.get(token, [])
        if len(places) <= 2 * MAX_OCCURRENCES:
            return places
        first, second = (max(0, bisect_left(places, at) - MAX_OCCURRENCES // 2) for at in (near, also_near))
        second = max(second, first + MAX_OCCURRENCES)
        return places[first : first + MAX_OCCURRENCES] + places[second : second + MAX_OCCURRENCES]
