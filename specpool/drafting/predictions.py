"""The source that follows a request's prediction of its answer. Pure.

It keeps one place in the prediction: the token that should come next. After a difference, it looks for the place where
prediction and answer agree again, by their longest common suffix. Close to the expected place, one token suffices; far
away, a few are needed. So it follows replaced, inserted, deleted, moved and repeated parts.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from weakref import WeakValueDictionary

from specpool.drafting.places import PlaceRates, Quality
from specpool.drafting.plans import NO_LOOKUP, Lookup, LookupSource
from specpool.drafting.prediction_index import PredictionIndex
from specpool.drafting.sequences import Sequence

# Maximum length of a common suffix to compare. In a text that repeats itself, the next place wins, not the longest one:
# that would lead to the same difference again.
MAX_SUFFIX = 8
# Agreeing tokens that confirm a place, and the minimum to resume at a distant one.
TRUSTED_RUN = 3
# Maximum distance from the expected places at which a shorter suffix counts.
NEARBY = 48
# Weight of a distance backward: answers leave parts out more often than they repeat them.
BACKWARD = 4
# Draft tokens after a difference, and per agreeing token since. A run tells more than the rates of earlier runs.
FIRST_TOKENS, GROWTH = 4, 2
# Tokens to reread when a sequence continues after its state was forgotten.
REREAD_TOKENS = 64
# Minimum chance of a draft for requests with a fixed length, which draft whether it pays or not.
MIN_FIXED_CHANCE = 0.25
# Clients whose rates are kept.
MAX_CLIENTS = 256


class PredictionSource:
    """Proposes the next tokens of each request's prediction.

    Each client has its own acceptance rates, so that wrong predictions of one client do not affect others.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._indexes: WeakValueDictionary[int, PredictionIndex] = WeakValueDictionary()
        """By the id of the prediction, which the index keeps alive."""
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
        """See `Source`. Learns from all tokens of sequences with a prediction, whatever was proposed."""
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
    """Where the answer of one sequence is in its prediction."""

    def __init__(self, sequence: Sequence, index: PredictionIndex, rates: PlaceRates) -> None:
        length = len(sequence.token_ids)
        self.index, self.rates = index, rates
        self.run = 0
        """Agreeing tokens before the place."""
        self._prediction, self._prompt_length = index.prediction, sequence.prompt_length
        self._read = max(self._prompt_length, length - REREAD_TOKENS)
        """Number of the sequence's tokens followed so far."""
        self._next = self._confirmed = min(len(self._prediction), self._read - self._prompt_length)
        """Index of the token that should come next, and the place after the last confirmed run."""
        self._is_distant = False
        """Whether the run began far from the expected places."""
        self._quality = Quality()
        self._since = 0
        """Tokens of the answer since the confirmed run."""

    def next_tokens(self, limit: int) -> tuple[int, ...]:
        return tuple(self._prediction[self._next : self._next + limit])

    def chances(self, num_tokens: int) -> tuple[float, ...]:
        """Acceptance probability of each of the next tokens."""
        return self.rates.chances(self.run, self._since, self._is_distant, self._quality, num_tokens)

    def follow(self, token_ids: Items[int]) -> None:
        """Move on by the tokens that the sequence gained."""
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
        """Find the place after a difference. `end`: number of tokens followed."""
        expected = min(len(self._prediction), self._confirmed + self._since)  # as many tokens were replaced
        near = far = 0, 0, 0  # length of the suffix, negative distance, place
        # Anything between both expected places is a deletion and an insertion at the same time.
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
        """Number of tokens before `place` that equal the last tokens of the answer. The last one is known to."""
        prediction, longest = self._prediction, min(MAX_SUFFIX, place, end - self._prompt_length)
        for length in range(1, longest):
            if prediction[place - 1 - length] != token_ids[end - 1 - length]:
                return length
        return longest
