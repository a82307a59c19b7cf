"""Predictions: following an answer through edits, calibrated chances, and isolation of clients."""

import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.drafting.plans import NO_LOOKUP, DraftMethod, Lookup, LookupSource
from specpool.drafting.predictions import MAX_CLIENTS, PredictionSource

TEXT = tuple(random.Random(1).choices(range(100, 400), k=400))


def make_sequence(prediction: tuple[int, ...], number: int = 1, client: str = "alice", **fields: object) -> Sequence:
    """Return a decoding sequence that has not generated tokens yet."""
    fields = {"adaptive": True, "method": DraftMethod.BEST, "prediction": prediction, "client": client, **fields}
    sequence = Sequence(number, GenerationRequest(str(number), (1, 2, 3), 9999, frozenset(), 16, **fields))  # type: ignore[arg-type]
    sequence.target.commit(2)
    return sequence


def gain(sequence: Sequence, *token_ids: int) -> None:
    sequence.token_ids += token_ids
    sequence.target.commit(len(sequence.token_ids) - 1)


def right_tokens(source: PredictionSource, sequence: Sequence, answer: tuple[int, ...], limit: int = 32) -> list[int]:
    """Generate an answer, then end the sequence. Return the number of right tokens of each proposal."""
    found = []
    for index in range(len(answer)):
        lookup = source.propose(sequence, limit)
        pairs = zip(lookup.token_ids, answer[index:], strict=False)
        found.append(next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(lookup.token_ids)))
        gain(sequence, answer[index])
        source.observe(sequence, lookup)
    source.forget([sequence.sequence_id])
    return found


def replaced(text: tuple[int, ...], start: int, end: int, *by: int) -> tuple[int, ...]:
    return text[:start] + by + text[end:]


def test_the_first_token_of_an_answer_is_predicted() -> None:
    lookup = PredictionSource().propose(make_sequence(TEXT), 32)
    assert (lookup.token_ids, lookup.source, lookup.run, lookup.start) == (TEXT[:4], LookupSource.PREDICTION, 0, 3)


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (replaced(TEXT, 200, 201, 7), 1),
        (replaced(TEXT, 200, 203, 7, 8, 9), 3),
        (replaced(TEXT, 200, 202, 7, 8, 9, 10, 11), 6),
        (replaced(TEXT, 200, 200, *range(20)), 21),
        (replaced(TEXT, 200, 230), 3),
        (TEXT[:100] + TEXT[300:] + TEXT[100:300], 8),
        (TEXT[:50] * 3 + TEXT[50:], 9),
    ],
    ids=["a token", "three tokens", "two by five", "inserted", "deleted", "moved", "repeated"],
)
def test_proposals_resume_soon_after_a_difference(answer: tuple[int, ...], wrong: int) -> None:
    found = right_tokens(PredictionSource(), make_sequence(TEXT), answer)
    assert sum(not right for right in found) <= wrong


@given(data=st.data(), prediction=st.lists(st.integers(0, 5), max_size=40), answer=st.lists(st.integers(0, 5)))
def test_proposals_are_parts_of_the_prediction(data: st.DataObject, prediction: list[int], answer: list[int]) -> None:
    source, sequence = PredictionSource(), make_sequence(tuple(prediction))
    while answer:
        limit = data.draw(st.integers(1, 9))
        lookup = source.propose(sequence, limit)
        ids, chances = list(lookup.token_ids), lookup.chances
        assert any(prediction[at : at + len(ids)] == ids for at in range(len(prediction) + 1))
        assert len(ids) == len(chances) <= limit
        assert all(0 < chance < 1 for chance in chances)
        size = data.draw(st.integers(1, 5))
        gain(sequence, *answer[:size])
        del answer[:size]
        if data.draw(st.booleans()):
            source.forget([1])  # as after a preemption


@given(edits=st.lists(st.tuples(st.integers(0, 399), st.integers(0, 20), st.lists(st.integers(0, 9))), max_size=4))
def test_proposals_resume_after_random_edits(edits: list[tuple[int, int, list[int]]]) -> None:
    answer = TEXT
    for start, length, by in edits:
        answer = replaced(answer, start, start + length, *by)
    found = right_tokens(PredictionSource(), make_sequence(TEXT), answer)
    assert sum(not right for right in found) <= sum(7 + len(by) for _, _, by in edits)


def test_drafts_grow_during_a_run_and_shrink_after_a_difference() -> None:
    source, sequence, lengths = PredictionSource(), make_sequence(TEXT), []
    for token in (*TEXT[:20], 7):
        lengths.append(len(source.propose(sequence, 32).token_ids))
        gain(sequence, token)
    assert lengths == [4, 4, 4, *range(6, 32, 2), *[32] * 5]
    assert len(source.propose(sequence, 32).token_ids) == 4


def test_chances_rise_during_a_run_and_fall_after_a_difference() -> None:
    source, sequence = PredictionSource(), make_sequence(TEXT)
    chances = []
    for token in (*TEXT[:100], 7):
        chances.append(source.propose(sequence, 1).chances[0])
        gain(sequence, token)
    after = source.propose(sequence, 1).chances[0]
    assert chances[0] < chances[8] < chances[40] < chances[100]
    assert after < 0.7 < 0.95 < chances[100]


def test_chances_are_calibrated() -> None:
    """The texts have an edit every 20 tokens on average."""
    source, rng, proposed, right = PredictionSource(), random.Random(2), 0.0, 0
    for number in range(30):
        answer = tuple(rng.randrange(50) if rng.random() < 0.05 else token for token in TEXT)
        sequence = make_sequence(TEXT, number)
        for index, token in enumerate(answer):
            lookup = source.propose(sequence, 1)
            if number >= 10 and lookup.token_ids:
                proposed, right = proposed + lookup.chances[0], right + (TEXT[index : index + 1] == (token,))
            gain(sequence, token)
        source.forget([number])
    assert proposed == pytest.approx(right, rel=0.05)


def test_wrong_predictions_cost_their_own_client_only() -> None:
    source = PredictionSource()

    def first_chance(client: str) -> float:
        return source.propose(make_sequence(TEXT, 99, client), 1).chances[0]

    before = first_chance("alice")
    for number in range(20):
        source.forget([99])
        right_tokens(source, make_sequence(TEXT, number, "eve"), tuple(range(500, 600)))
    assert first_chance("eve") < before / 2
    source.forget([99])
    assert first_chance("alice") == before
    for number in range(MAX_CLIENTS):
        source.propose(make_sequence(TEXT, number, str(number)), 1)
    source.forget([99])
    assert first_chance("eve") == before, "the rates of a bounded number of clients are kept"


def test_requests_with_a_fixed_length_leave_out_unlikely_tokens() -> None:
    source, sequence = PredictionSource(), make_sequence(TEXT, adaptive=False)
    assert source.propose(sequence, 4).token_ids == TEXT[:4]
    gain(sequence, *range(500, 520))
    assert source.propose(sequence, 4) == NO_LOOKUP


@pytest.mark.parametrize("wrong", [False, True])
def test_a_token_takes_little_time(wrong: bool) -> None:
    """The prediction is long and has few different tokens."""
    prediction = tuple(random.Random(3).choices(range(20), k=20_000))
    answer = tuple(random.Random(4).choices(range(20), k=2000)) if wrong else prediction[:2000]
    source, sequence = PredictionSource(), make_sequence(prediction)
    for _ in range(20):
        source.propose(sequence, 1)  # indexes the prediction
    began = time.process_time()
    for token in answer:
        gain(sequence, token)
        source.observe(sequence, Lookup())
    seconds = (time.process_time() - began) / len(answer)
    assert seconds < 100e-6


def test_samples_share_an_index_of_bounded_size() -> None:
    """A request may have 64 samples and a prediction of 100,000 tokens."""

    def used(*predictions: tuple[int, ...]) -> tuple[int, int]:
        """Return the memory in use while the sequences run, and after their end."""
        source, sequences = PredictionSource(), [make_sequence(each, i) for i, each in enumerate(predictions)]
        tracemalloc.start()
        for sequence in 30 * sequences:
            source.propose(sequence, 8)
        running, _ = tracemalloc.get_traced_memory()
        source.forget(range(len(predictions)))
        ended, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return running, ended

    prediction = tuple(range(20_000))
    running, ended = used(*[prediction] * 16)
    assert running < used(*((*prediction, i) for i in range(16)))[0] / 8
    assert ended < running / 8
    assert used(10 * prediction)[0] < 2 * running  # only the beginning is indexed
