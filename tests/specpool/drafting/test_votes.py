"""Votes of matches: the tokens that they draft, and the probabilities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.drafting.acceptance import likely_tokens
from specpool.drafting.plans import NO_LOOKUP, Lookup, LookupSource
from specpool.drafting.votes import LENGTHS, MAX_MATCH, MIN_CHANCE, VoteRates


def make_sequence(number: int = 1, adaptive: bool = True) -> Sequence:
    return Sequence(number, GenerationRequest(str(number), (1, 2, 3), 200, frozenset(), 8, adaptive=adaptive))


def vote(rates: VoteRates, *found: tuple[int, tuple[int, ...]], sequence: Sequence | None = None) -> Lookup:
    matches = sorted(found, key=lambda match: -match[0])
    return rates.vote(sequence or make_sequence(), [*matches], 32)


def learn(rates: VoteRates, is_right: bool, found: tuple[int, tuple[int, ...]], times: int, number: int = 1) -> None:
    """Run rounds in which the target chooses the drafted tokens, or others."""
    for _ in range(times):
        sequence = make_sequence(number)
        lookup = vote(rates, found, sequence=sequence)
        sequence.token_ids += lookup.token_ids if is_right else (99,)
        rates.observe(sequence, lookup)


def make_rates() -> VoteRates:
    return VoteRates(LookupSource.ANSWERS)


def test_frequent_continuations_beat_later_ones_and_long_matches_beat_short_ones() -> None:
    assert vote(make_rates(), (3, (7, 8)), (3, (5, 6)), (3, (5, 6))).token_ids == (5, 6)
    assert vote(make_rates(), (9, (7, 8)), (2, (5, 6)), (2, (5, 6))).token_ids == (7, 8)
    assert vote(make_rates(), (3, (7, 8)), (3, (5, 6))).token_ids[:1] == (7,), "the best match decides a tie"


def test_matches_that_disagree_with_the_draft_lose_their_vote() -> None:
    found = vote(make_rates(), (9, (5, 1, 1)), (8, (5, 2, 3)), (8, (5, 2, 3)), (9, (4, 1, 1)), (9, (4, 1, 1)))
    assert found.token_ids == (5, 2, 3)
    assert found.source is LookupSource.ANSWERS


def test_a_draft_ends_with_its_last_match() -> None:
    assert vote(make_rates(), (20, (5, 6, 7)), (20, (5,))).token_ids == (5, 6, 7)
    assert vote(make_rates()) == NO_LOOKUP


def test_only_adaptive_requests_draft_after_a_single_token() -> None:
    fixed = make_sequence(adaptive=False)
    assert vote(make_rates(), (1, (5, 6))).token_ids
    assert vote(make_rates(), (1, (5, 6)), sequence=fixed) == NO_LOOKUP
    assert vote(make_rates(), (2, (5, 6)), sequence=fixed).token_ids


def test_chances_approach_the_observed_share_for_similar_votes_only() -> None:
    rates, wrong, right = make_rates(), (4, (5, 6, 7)), (16, (5, 6, 7))
    before = vote(rates, (2, (5, 6, 7))).chances
    for number in range(300):  # many sequences, so that none has a rate of its own
        learn(rates, False, wrong, 1, number)
        learn(rates, True, right, 1, number)
    assert vote(rates, wrong, sequence=make_sequence(999)).chances[0] < 0.1
    assert min(vote(rates, right, sequence=make_sequence(999)).chances) > 0.9
    assert vote(rates, (2, (5, 6, 7)), sequence=make_sequence(999)).chances[:1] == before[:1]
    reported = rates.by_length()
    assert reported.keys() == set(LENGTHS)
    assert reported[4] < 0.1 < 0.9 < reported[16]


def test_a_sequence_that_repeats_badly_drafts_less() -> None:
    rates, match = make_rates(), (6, tuple(range(20, 40)))
    for number in range(100):
        learn(rates, True, match, 1, number)
    learn(rates, False, match, 20, number=500)
    good, bad = (vote(rates, match, sequence=make_sequence(number)) for number in (600, 500))
    assert bad.chances[0] < good.chances[0]
    rates.forget([500])
    assert vote(rates, match, sequence=make_sequence(500)) == vote(rates, match, sequence=make_sequence(600))


def test_lookups_are_compared_with_all_tokens_gained_since() -> None:
    """Other rounds in flight may commit between a lookup and the commit of its round."""
    rates, sequence = make_rates(), make_sequence()
    lookup = vote(rates, (16, (8, 9, 7, 6)), sequence=sequence)
    sequence.token_ids += [8, 9, 1]
    rates.observe(sequence, lookup)
    tried = [each for each in rates._rates if each.tried]
    assert sum(each.tried for each in tried) == pytest.approx(3, abs=0.1)
    assert sum(each.accepted for each in tried) == pytest.approx(2, abs=0.1)


@given(
    rounds=st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.integers(1, MAX_MATCH), st.lists(st.integers(0, 2), min_size=1, max_size=9)), max_size=6
            ),
            st.lists(st.integers(0, 2), min_size=1, max_size=9),
        ),
        max_size=12,
    )
)
def test_chances_are_probabilities_and_limit_the_draft(
    rounds: list[tuple[list[tuple[int, list[int]]], list[int]]],
) -> None:
    rates = make_rates()
    for found, gained in rounds:
        sequence = make_sequence()
        lookup = vote(rates, *((length, tuple(following)) for length, following in found), sequence=sequence)
        assert len(lookup.token_ids) == len(lookup.chances) == len(lookup.bins)
        assert all(0 < chance < 1 for chance in lookup.chances)
        assert likely_tokens(lookup.token_ids, lookup.chances, MIN_CHANCE) == lookup.token_ids
        assert lookup.run == 0 or lookup.run in {length for length, _ in found}
        sequence.token_ids += gained
        rates.observe(sequence, lookup)
