"""Lookups in a request's prediction of its answer. Pure.

The source tracks one place in the prediction: the token expected next. After a difference, it looks for the place where
prediction and answer agree again, by their longest common suffix. Near the expected place, one matching token is
enough; farther away, it takes `TRUSTED_RUN`. This handles replaced, inserted, deleted, moved and repeated parts.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from weakref import WeakValueDictionary

from specpool.drafting.places import PlaceRates, Quality
from specpool.drafting.plans import NO_LOOKUP, Lookup, LookupSource
from specpool.drafting.prediction_index import PredictionIndex
from specpool.drafting.sequences import Sequence

# Maximum length of a common suffix to compare. In repetitive text, longer suffixes would lead back to the same
# difference; with this limit they tie, and the closest place wins.
MAX_SUFFIX = 8
# Agreeing tokens that confirm a place. Also the minimum to resume at a distant place.
TRUSTED_RUN = 3
# Maximum distance from the expected places at which a shorter suffix is enough.
NEARBY = 48
# Weight of backward distances: answers skip parts of a prediction more often than they repeat them.
BACKWARD = 4
# Minimum draft limit, and its growth per agreeing token. The current run predicts more than rates of earlier runs.
FIRST_TOKENS, GROWTH = 4, 2
# Tokens to follow again when a sequence continues after its state was forgotten.
REREAD_TOKENS = 64
# Minimum acceptance probability of the first token, for requests with a fixed draft length. They draft in any case.
MIN_FIXED_CHANCE = 0.25
# Maximum number of clients with rates of their own.
MAX_CLIENTS = 256


class PredictionSource:
    """Proposes the next tokens of each request's prediction.

    Each client has its own acceptance rates, so one client's wrong predictions do not affect others.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._indexes: WeakValueDictionary[int, PredictionIndex] = WeakValueDictionary()
        """Keyed by `id()` of the prediction, which its index keeps alive."""
        self._rates: OrderedDict[str, PlaceRates] = OrderedDict()
        """By client, least recently used first."""

    def propose(self, sequence: Sequence, limit: int) -> Lookup:
        """See `Source`. Indexes long predictions over several calls."""
        place = self._place(sequence)
        place.index.index_some()
        if not sequence.is_decoding:
            return NO_LOOKUP
        place.follow(sequence.token_ids)
        pending = sequence.num_pending_tokens
        token_ids = place.next_tokens(min(limit, pending + max(FIRST_TOKENS, GROWTH * (place.run + pending))))
        chances = place.chances(len(token_ids))
        if not token_ids or (not sequence.request.adaptive and chances[0] < MIN_FIXED_CHANCE):
            return NO_LOOKUP
        return Lookup(token_ids, chances, LookupSource.PREDICTION, place.run, len(sequence.token_ids))

    def observe(self, sequence: Sequence, lookup: Lookup) -> None:
        """See `Source`. Learns from all tokens of a sequence with a prediction, even if another source drafted."""
        if sequence.sequence_id in self._places:
            self._places[sequence.sequence_id].follow(sequence.token_ids)

    def verified(self, sequence: Sequence, expected: float, gained: int) -> None:
        """Learn from a verified draft; see `PlaceRates.add_draft`."""
        if sequence.sequence_id in self._places:
            self._places[sequence.sequence_id].rates.add_draft(expected, gained)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See `Source`."""
        for sequence_id in sequence_ids:
            self._places.pop(sequence_id, None)

    def _place(self, sequence: Sequence) -> "_Place":
        place = self._places.get(sequence.sequence_id)
        if place is None:
            client = sequence.request.namespace[0]
            rates = self._rates.pop(client, None) or PlaceRates()
            self._rates[client] = rates
            if len(self._rates) > MAX_CLIENTS:
                self._rates.popitem(last=False)
            prediction = sequence.request.prediction
            index = self._indexes.setdefault(id(prediction), PredictionIndex(prediction))
            place = self._places[sequence.sequence_id] = _Place(sequence, index, rates)
        return place


class _Place:
    """The place in a prediction that the answer of one sequence has reached."""

    def __init__(self, sequence: Sequence, index: PredictionIndex, rates: PlaceRates) -> None:
        length = len(sequence.token_ids)
        self.index, self.rates = index, rates
        self.run = 0
        """Agreeing tokens before the place."""
        self._prediction, self._prompt_length = index.prediction, sequence.prompt_length
        self._read = max(self._prompt_length, length - REREAD_TOKENS)
        """Number of tokens of the sequence followed so far."""
        self._next = self._confirmed = min(len(self._prediction), self._read - self._prompt_length)
        """Index of the token expected next, and the place after the last confirmed run."""
        self._is_distant = False
        """Whether the run began far from the expected places."""
        self._quality = Quality()
        self._since = 0
        """Tokens of the answer since the last confirmed run."""

    def next_tokens(self, limit: int) -> tuple[int, ...]:
        return tuple(self._prediction[self._next : self._next + limit])

    def chances(self, num_tokens: int) -> tuple[float, ...]:
        """Acceptance probability of each of the next tokens."""
        return self.rates.chances(self.run, self._since, self._is_distant, self._quality, num_tokens)

    def follow(self, token_ids: Items[int]) -> None:
        """Advance by the tokens that the sequence has gained."""
        for end in range(self._read + 1, len(token_ids) + 1):
            is_right = False
            if self._next < len(self._prediction):
                is_right = self._prediction[self._next] == token_ids[end - 1]
                self.rates.add(self.run, self._since, self._is_distant, self._quality, is_right)
                self._quality.add(is_right)
            self._since += 1
            if is_right:
                self._next, self.run = self._next + 1, self.run + 1
            else:
                self._resume(token_ids, end)
            if self.run >= TRUSTED_RUN:
                self._confirmed, self._since = self._next, 0
        self._read = len(token_ids)

    def _resume(self, token_ids: Items[int], end: int) -> None:
        """Find a new place after a difference. `end`: number of tokens followed so far."""
        expected = min(len(self._prediction), self._confirmed + self._since)  # if tokens were replaced one for one
        near = far = 0, 0, 0  # length of the suffix, negative distance, place
        # Places between both expected ones have distance 0: a deletion combined with an insertion.
        first, last = self._confirmed, expected + 1
        prediction, previous = self._prediction, token_ids[end - 2]
        for place in self.index.places(token_ids[end - 1], self._confirmed, expected):
            run = self._suffix(token_ids, end, place) if prediction[place - 2] == previous else 1
            distance = BACKWARD * (first - place) if place < first else place - last if place > last else 0
            if distance > NEARBY:
                if run >= TRUSTED_RUN:
                    far = max(far, (run, -distance, place))
            elif run >= near[0]:
                near = max(near, (run, -distance, place))
        self._is_distant = far[0] >= near[0] + TRUSTED_RUN
        self.run, _, self._next = far if self._is_distant else near
        chance, quality = self.rates.chance, self._quality
        if not self.run or chance(0, self._since, False, quality) > chance(self.run, 0, self._is_distant, quality):
            self.run, self._is_distant, self._next = 0, False, expected

    def _suffix(self, token_ids: Items[int], end: int, place: int) -> int:
        """Return the number of tokens before `place` that equal the answer's last tokens. The last one always does."""
        prediction, longest = self._prediction, min(MAX_SUFFIX, place, end - self._prompt_length)
        for length in range(1, longest):
            if prediction[place - 1 - length] != token_ids[end - 1 - length]:
                return length
        return longest
