"""Chooses draft tokens by vote among the continuations of earlier occurrences of the last tokens. Pure.

As in SuffixDecoding (Oliaro et al., arXiv 2411.04975), long matches and frequent continuations win. Each token has an
acceptance probability, learned from the outcomes of similar votes.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from specpool.drafting.acceptance import PRIOR_TOKENS, Acceptance, agreement_length
from specpool.drafting.plans import NO_LOOKUP, Lookup, LookupSource
from specpool.drafting.sequences import Sequence

# Maximum length of a match. Longer matches are no better.
MAX_MATCH = 32
# Minimum probability that a draft token and all before it are accepted. Verifying a row never costs less.
MIN_CHANCE = 0.02
# Minimum match for requests with a fixed draft length. They draft in any case, and matches of one token rarely pay off.
MIN_FIXED_LENGTH = 2
# Lower bounds of the bins of match lengths.
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24)
# Number of bins of a token's share of the votes, and of the number of matches that it follows.
SHARES, COUNTS = 4, 4
# Decay of a sequence's observations per draft token.
RECENT = 0.98

_LENGTH_BINS = tuple(sum(bound <= length for bound in LENGTHS) - 1 for length in range(MAX_MATCH + 1))


Match = tuple[int, Items[int]]
"""An earlier occurrence of the last tokens: the number of equal tokens, at most `MAX_MATCH`, and the continuation."""


def match_length(token_ids: Items[int], end: int, last_ids: Items[int], length: int = 0) -> int:
    """Count the tokens before `end` that equal the last ones, up to `MAX_MATCH`. `length`: tokens known to be equal."""
    limit = min(MAX_MATCH, end, len(last_ids))
    while length < limit and token_ids[end - 1 - length] == last_ids[-1 - length]:
        length += 1
    return length


class VoteRates:
    """Acceptance rates of one source's tokens, by match length, share of the votes, and number of matches."""

    def __init__(self, source: LookupSource) -> None:
        self._source = source
        self._rates = [Acceptance() for _ in range(len(LENGTHS) * SHARES * COUNTS)]
        self._chances = [_prior(bin_) for bin_ in range(len(self._rates))]
        self._sequences: dict[int, Acceptance] = {}
        """By sequence id: accepted tokens, and as `tried` the expected number of accepted tokens."""

    def vote(self, sequence: Sequence, matches: list[Match], limit: int) -> Lookup:
        """Draft at most `limit` tokens, for adaptive requests only likely ones. `matches`: longest first."""
        min_length, min_chance = (1, MIN_CHANCE) if sequence.request.adaptive else (MIN_FIXED_LENGTH, 0.0)
        if not matches or matches[0][0] < min_length:  # the usual case, in every round of every sequence
            return NO_LOOKUP
        odds, product, run = self._odds(sequence.sequence_id), 1.0, 0
        token_ids, chances, bins = list[int](), list[float](), list[int]()
        for step in range(limit):
            token, share, matches = _winner(matches, step)
            if not matches:
                break
            run = run or matches[0][0]
            bin_ = _bin(matches[0][0] + step, share, len(matches))
            chance = self._chances[bin_]
            chance = chance * odds / (chance * odds + 1 - chance)
            # Pending tokens do not lower the product: if one is rejected, the lookup is not verified anyway.
            product = chance * (product if step > sequence.num_pending_tokens else 1.0)
            if product < min_chance:
                break
            token_ids.append(token)
            chances.append(chance)
            bins.append(bin_)
        start = len(sequence.token_ids)
        return Lookup(tuple(token_ids), tuple(chances), self._source, run, start, tuple(bins)) if bins else NO_LOOKUP

    def observe(self, sequence: Sequence, lookup: Lookup) -> None:
        """Learn from the tokens that a sequence has gained since the lookup, whether it was verified or not."""
        if not lookup.bins:
            return
        gained = tuple(sequence.token_ids[lookup.start : lookup.start + len(lookup.token_ids)])
        accepted = agreement_length(lookup.token_ids, gained)
        record = self._sequences.setdefault(sequence.sequence_id, Acceptance())
        for i, bin_ in enumerate(lookup.bins[: min(accepted + 1, len(gained))]):
            is_accepted = i < accepted
            record.accepted = record.accepted * RECENT + is_accepted
            record.tried = record.tried * RECENT + self._chances[bin_]
            self._rates[bin_].add(1, is_accepted)
            self._chances[bin_] = self._rates[bin_].rate(_prior(bin_))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def by_length(self) -> dict[int, float]:
        """Return the acceptance rate of draft tokens by lower bound of the match length."""
        size, rates = SHARES * COUNTS, dict[int, float]()
        for i, length in enumerate(LENGTHS):
            of_length = self._rates[i * size : (i + 1) * size]
            total = Acceptance(sum(each.accepted for each in of_length), sum(each.tried for each in of_length))
            rates[length] = total.rate(_prior((i + 1) * size - 1))
        return rates

    def _odds(self, sequence_id: int) -> float:
        """Return the factor on each token's odds, from the sequence's acceptance relative to expectation."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return 1.0
        return (sequence.accepted + PRIOR_TOKENS) / (sequence.tried + PRIOR_TOKENS)


def _winner(matches: list[Match], step: int) -> tuple[int, float, list[Match]]:
    """Return the token with the most votes, its share of them, and the matches that it follows.

    The weight of a match is its length squared, close to the best fit to greedy answers.
    """
    if len(matches) == 1:
        following = matches[0][1]
        return (following[step], 1.0, matches) if step < len(following) else (0, 0.0, [])
    votes = dict[int, int]()
    for length, following in matches:
        if step < len(following):
            token = following[step]
            votes[token] = votes.get(token, 0) + length * length
    if not votes:
        return 0, 0.0, []
    token = max(votes, key=votes.__getitem__)
    share = votes[token] / sum(votes.values())
    return token, share, [match for match in matches if step < len(match[1]) and match[1][step] == token]


def _bin(length: int, share: float, count: int) -> int:
    length_bin = _LENGTH_BINS[length if length < MAX_MATCH else MAX_MATCH]
    return (length_bin * SHARES + int(share * (SHARES - 1))) * COUNTS + (count if count < COUNTS else COUNTS) - 1


def _prior(bin_: int) -> float:
    """Return the acceptance probability before the first observation, higher for long matches and unanimous votes."""
    of_length, share = divmod(bin_ // COUNTS, SHARES)
    return (share + 0.5) / SHARES * LENGTHS[of_length] / (LENGTHS[of_length] + 2)
