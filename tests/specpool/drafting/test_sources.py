"""Choice between the sources of lookups, and their acceptance rates."""

import pytest

from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from specpool.drafting.plans import NO_LOOKUP, DraftMethod, LookupSource
from specpool.drafting.sources import DraftSources

OWN, ANSWERS = LookupSource.SEQUENCE, LookupSource.ANSWERS
ANSWER = tuple(range(20, 50))


def make_sequence(prompt: tuple[int, ...], number: int = 1, **fields: object) -> Sequence:
    """Return a decoding sequence."""
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


def make_sources(*answers: Sequence, store_tokens: int = 1000) -> DraftSources:
    sources = DraftSources(store_tokens)
    for sequence in answers:
        sources.observe(sequence, NO_LOOKUP)
    sources.index_answers()
    return sources


def found_by(sources: DraftSources, sequence: Sequence, limit: int = 3) -> tuple[tuple[int, ...], int, LookupSource]:
    lookup = sources.propose(sequence, limit)
    assert lookup.start == len(sequence.token_ids)
    return lookup.token_ids, lookup.run, lookup.source


def test_the_first_token_of_a_stored_answer_is_found() -> None:
    sources = make_sources(finished())
    assert found_by(sources, make_sequence((9, 4, 5, 6))) == (ANSWER[:3], 3, ANSWERS)
    assert found_by(sources, make_sequence((9, *ANSWER[:7]))) == (ANSWER[7:10], 7, ANSWERS)


@pytest.mark.parametrize("store_tokens", [0, 1000])
@pytest.mark.parametrize("stored", [{}, {"cache_salt": ""}, {"client": "bob"}, {"cache_salt": "t"}])
@pytest.mark.parametrize("looking", [{}, {"cache_salt": ""}, {"client": "bob"}, {"cache_salt": "t"}])
def test_answers_are_shared_within_a_client_and_a_salt(
    store_tokens: int, stored: dict[str, str], looking: dict[str, str]
) -> None:
    sources = make_sources(finished(**stored), store_tokens=store_tokens)
    found = sources.propose(make_sequence((9, *ANSWER[:7]), **looking), 3)
    assert bool(found.token_ids) is (stored == looking and bool(store_tokens) and "" not in stored.values())


@pytest.mark.parametrize(
    ("method", "sources"),
    [
        (DraftMethod.MODEL, set()),
        (DraftMethod.NGRAM, {OWN}),
        (DraftMethod.SUFFIX, {OWN, ANSWERS}),
        (DraftMethod.PREDICTION, set()),
        (DraftMethod.BEST, {OWN, ANSWERS}),
    ],
)
def test_methods_choose_the_sources(method: DraftMethod, sources: set[LookupSource]) -> None:
    drafting = make_sources(finished(method=DraftMethod.MODEL))
    repeated, stored = (7, 8, 9, 7, 8), ANSWER[:7]
    lookups = [drafting.propose(make_sequence(ids, i, method=method), 3) for i, ids in enumerate((repeated, stored))]
    assert {lookup.source for lookup in lookups if lookup.token_ids} == sources


@pytest.mark.parametrize("method", DraftMethod)
def test_a_prediction_drafts_with_every_method(method: DraftMethod) -> None:
    """Validation refuses other explicit methods. The server's default method may be any."""
    lookup = make_sources().propose(make_sequence((1, 2), method=method, prediction=ANSWER), 3)
    assert (lookup.token_ids, lookup.source) == (ANSWER[:3], LookupSource.PREDICTION)


def test_the_more_promising_source_drafts() -> None:
    """Own text continues with 1, 2, and the answer with 27, 28. A new sequence starts with the overall rates."""
    sources, prompt = make_sources(finished()), (*ANSWER[3:7], 1, 2, *ANSWER[3:7])
    own, answers = ((1, 2), 4, OWN), (ANSWER[7:9], 4, ANSWERS)
    assert found_by(sources, make_sequence(prompt), 2) == own, "equal rates"
    for number, (gained, better) in enumerate([((27, 28, 9), answers), ((1, 2, 9), own), ((27, 28, 9), answers)]):
        for _ in range(99):
            sequence = make_sequence(prompt, number)
            found = sources.propose(sequence, 2)
            sequence.token_ids += gained
            sources.observe(sequence, found)
        assert found_by(sources, make_sequence(prompt, number), 2) == better
        assert found_by(sources, make_sequence(prompt, 99), 2) == better


def test_each_source_has_its_own_rates() -> None:
    sources, prompt = make_sources(finished()), ANSWER[:6]
    lookup = sources.propose(make_sequence(prompt), 3)
    assert sources.answers is not None
    before = sources.answers.rates.by_length(), sources.sequence.rates.by_length()
    sequence = make_sequence((*prompt, *lookup.token_ids))
    sources.observe(sequence, lookup)
    after = sources.answers.rates.by_length(), sources.sequence.rates.by_length()
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_the_end_of_an_answer_is_less_promising() -> None:
    """It has fewer tokens to draft than a loop in the sequence's own text."""
    sources = make_sources(finished())
    for number in range(100, 130):
        sequence = make_sequence(ANSWER[:4], number)
        lookup = sources.propose(sequence, 3)
        sequence.token_ids += lookup.token_ids
        sources.observe(sequence, lookup)
    for end, source in ((-1, OWN), (-8, ANSWERS)):
        run = ANSWER[end - 4 : end]
        assert sources.propose(make_sequence((*run, 1, *run)), 8).source is source
