"""Prompt lookup in a sequence's own tokens and in earlier answers: sources, run lengths and their rates."""

import pytest

from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from specpool.drafting.lookup import PromptLookup
from specpool.drafting.plans import DraftMethod, Lookup, LookupSource

OWN, ANSWERS = LookupSource.SEQUENCE, LookupSource.ANSWERS
ANSWER = tuple(range(20, 50))


def make_sequence(prompt: tuple[int, ...], number: int = 1, **fields: object) -> Sequence:
    """A decoding sequence."""
    fields = {"adaptive": True, "method": DraftMethod.BEST, "cache_salt": "s", "client": "alice", **fields}
    sequence = Sequence(number, GenerationRequest(str(number), prompt, 200, frozenset(), 8, **fields))  # type: ignore[arg-type]
    sequence.target.commit(len(prompt) - 1)
    return sequence


def finished(
    prompt: tuple[int, ...] = (1, 2, 3, 4, 5, 6), answer: tuple[int, ...] = ANSWER, **fields: object
) -> Sequence:
    sequence = make_sequence(prompt, **fields)
    sequence.token_ids += answer
    sequence.finish = Finish(FinishReason.LENGTH)
    return sequence


def make_lookup(*answers: Sequence, store_tokens: int = 1000) -> PromptLookup:
    lookup = PromptLookup(store_tokens)
    for sequence in answers:
        lookup.store_answer(sequence)
    lookup.index_answers()
    return lookup


def test_answers_are_found_from_their_first_token_on() -> None:
    lookup = make_lookup(finished())
    assert lookup.look_up(make_sequence((9, 4, 5, 6)), 3) == Lookup(ANSWER[:3], 3, ANSWERS, 4)
    assert lookup.look_up(make_sequence((9, *ANSWER[:7])), 3) == Lookup(ANSWER[7:10], 4, ANSWERS, 8)


@pytest.mark.parametrize("store_tokens", [0, 1000])
@pytest.mark.parametrize("stored", [{}, {"cache_salt": ""}, {"client": "bob"}, {"cache_salt": "t"}])
@pytest.mark.parametrize("looking", [{}, {"cache_salt": ""}, {"client": "bob"}, {"cache_salt": "t"}])
def test_answers_are_shared_within_a_client_and_a_salt(
    store_tokens: int, stored: dict[str, str], looking: dict[str, str]
) -> None:
    lookup = make_lookup(finished(**stored), store_tokens=store_tokens)
    found = lookup.look_up(make_sequence((9, *ANSWER[:7]), **looking), 3)
    assert bool(found.token_ids) is (stored == looking and bool(store_tokens) and "" not in stored.values())


def test_requests_for_the_draft_model_look_nothing_up() -> None:
    lookup = make_lookup(finished(method=DraftMethod.MODEL))
    assert lookup.look_up(make_sequence(ANSWER[:7], method=DraftMethod.MODEL), 3) == Lookup()
    assert lookup.look_up(make_sequence(ANSWER[:7], method=DraftMethod.NGRAM), 3).run, "but their answers are shared"


def test_only_adaptive_requests_draft_after_a_single_repeated_token() -> None:
    lookup, prompt = make_lookup(), (7, 8, 9, 7)
    assert lookup.look_up(make_sequence(prompt), 2) == Lookup((8, 9), 1, OWN, 4)
    assert lookup.look_up(make_sequence(prompt, adaptive=False), 2) == Lookup()


def test_the_more_promising_source_drafts() -> None:
    """Own text continues with 1, 2 and the answer with 27, 28. A new sequence starts with the rates of the others."""
    lookup, prompt = make_lookup(finished()), (*ANSWER[3:7], 1, 2, *ANSWER[3:7])
    own, answers = Lookup((1, 2), 4, OWN, 10), Lookup(ANSWER[7:9], 4, ANSWERS, 10)
    assert lookup.look_up(make_sequence(prompt), 2) == own, "equal rates"
    for number, (gained, better) in enumerate([((27, 28, 9), answers), ((1, 2, 9), own), ((27, 28, 9), answers)]):
        for _ in range(99):
            sequence = make_sequence(prompt, number)
            found = lookup.look_up(sequence, 2)
            sequence.token_ids += gained
            lookup.observe(sequence, found)
        assert lookup.look_up(make_sequence(prompt, number), 2) == better
        assert lookup.look_up(make_sequence(prompt, 99), 2) == better


def test_each_source_and_run_length_has_its_own_rate() -> None:
    lookup = make_lookup()
    before = {
        (source, run): rates.overall_rate
        for source, by_run in lookup.acceptance.items()
        for run, rates in by_run.items()
    }
    lookup.observe(make_sequence((1, 2, 3)), Lookup((1, 2), 2, ANSWERS))
    lookup.observe(make_sequence((1, 2, 3)), Lookup((3, 4), 4, OWN))
    after = {key: lookup.acceptance[key[0]][key[1]].overall_rate for key in before}
    assert {key for key in before if after[key] != before[key]} == {(ANSWERS, 2), (OWN, 4)}
    assert after[ANSWERS, 2] > before[ANSWERS, 2]
    assert after[OWN, 4] < before[OWN, 4]


def test_the_end_of_an_answer_is_less_promising() -> None:
    """Fewer tokens can be drafted from it than from a loop in the sequence's own text."""
    lookup = make_lookup(finished())
    for _ in range(30):
        lookup.observe(make_sequence((1, 2, 3)), Lookup((1, 2, 3), 4, ANSWERS))
    for end, source in ((-1, OWN), (-8, ANSWERS)):
        run = ANSWER[end - 4 : end]
        assert lookup.look_up(make_sequence((*run, 1, *run)), 8).source is source


def test_lookups_are_compared_with_all_tokens_since() -> None:
    """Rounds in flight may commit between the lookup and the commit of its round."""
    lookup, sequence = make_lookup(), make_sequence((7, 8, 9, 7))
    sequence.token_ids += [8, 9, 1]
    lookup.observe(sequence, Lookup((8, 9, 7, 6), 1, OWN, start=4))
    rates = lookup.acceptance[OWN][1]._sequences[1]
    assert (rates.tried, rates.accepted) == (3, 2)
