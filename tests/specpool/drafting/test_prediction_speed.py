"""Simulated rounds with predictions: gain of right ones, cost of wrong ones, and isolation of clients."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Items

import pytest

from specpool.distill.replay import Prediction
from specpool.drafting.acceptance import agreement_length
from specpool.drafting.costs import RoundCosts, StepTimes, Timed
from specpool.drafting.drafting import Drafting
from specpool.drafting.outcome import RoundOutcome
from specpool.drafting.plans import DraftMethod
from specpool.planning.replaying import Commit, DraftCache, Recording, Request, Sequence
from specpool.protocol.rounds import VerifyItem

RNG = random.Random(1)
TEXTS = [tuple(RNG.choices(range(500), k=400)) for _ in range(8)]
Edit = Callable[[tuple[int, ...]], tuple[int, ...]]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def edited(text: tuple[int, ...]) -> tuple[int, ...]:
    """Replace three tokens, insert six, and delete six."""
    return (*text[:100], 7, 8, 9, *text[103:200], *range(6), *text[200:300], *text[306:])


def wrong(text: tuple[int, ...]) -> tuple[int, ...]:
    """Reverse the tokens."""
    return text[::-1]


class Server:
    """Simulates rounds that take 3 ms, plus 1 ms per row. At best, drafts speed up 8 sequences by 1.38x."""

    def __init__(self, first: float = 0.003, row: float = 0.001) -> None:
        self.costs = RoundCosts(
            StepTimes({1: 1.0, 2: 1.0}), StepTimes({rows: first + row * rows for rows in ROWS}), 0.0
        )
        self.drafting, self._number = Drafting(16, self.costs), 0

    def answer(self, texts: Items[tuple[int, ...]], predictions: Items[tuple[int, ...]]) -> list[float]:
        """Return the seconds until each answer is complete. All requests start at once, each from its own client."""
        running, seconds, ended = dict[int, Sequence](), 0.0, dict[int, float]()
        for client, (text, prediction) in enumerate(zip(texts, predictions, strict=True)):
            self._number += 1
            request = Request(DraftMethod.PREDICTION, 16, prediction=prediction, namespace=(str(client), ""))
            recording = Recording((1, 2), text, Prediction([], []))
            running[client] = Sequence(self._number, request, recording, [1, 2], DraftCache(1), is_decoding=True)
        while running:
            seconds += self._round(list(running.values()))
            for client, sequence in list(running.items()):
                if sequence.is_complete:
                    self.drafting.forget([running.pop(client).sequence_id])
                    ended[client] = seconds
        return [ended[client] for client in range(len(texts))]

    def _round(self, sequences: list[Sequence]) -> float:
        plans, items, commits = self.drafting.plan_round(sequences, None), [], []
        for sequence in sequences:
            drafted = plans[sequence.sequence_id].lookup_ids
            accepted = agreement_length(drafted, sequence.following(len(drafted)))
            gained = sequence.following(accepted + 1)
            method = DraftMethod.PREDICTION if drafted else None
            items.append(VerifyItem(sequence.sequence_id, 0, (0,), draft_token_ids=drafted))
            commits.append(Commit(sequence, gained, len(drafted), method, None, plans[sequence.sequence_id].lookup))
            sequence.token_ids += gained
        seconds = self.costs.verify(sum(1 + len(item.draft_token_ids) for item in items))
        outcome = RoundOutcome(items, Timed(seconds, seconds), commits)
        self.drafting.observe_round(outcome)
        self.drafting.observe_seconds(outcome, seconds)
        return seconds


@pytest.mark.parametrize(("batch", "gain"), [(1, 2.2), (8, 1.25)])
def test_an_edited_text_is_faster(batch: int, gain: float) -> None:
    server, texts = Server(), TEXTS[:batch]
    plain = max(server.answer(texts, [()] * batch))
    for _ in range(3):
        fast = max(server.answer(texts, [edited(text) for text in texts]))
    assert plain > gain * fast


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("after", [edited, wrong, None], ids=["after edited", "after wrong", "first"])
def test_a_wrong_prediction_costs_little(batch: int, after: Edit | None) -> None:
    server, texts = Server(), TEXTS[:batch]
    plain = max(server.answer(texts, [()] * batch))
    if after is not None:
        server.answer(texts, [after(text) for text in texts])
    assert max(server.answer(texts, [wrong(text) for text in texts])) < 1.02 * plain


@pytest.mark.parametrize("right", [8, 16, 32])
def test_regularly_wrong_tokens_cost_little(right: int) -> None:
    """Rates of single tokens cannot tell that drafts often begin just before a wrong token."""

    def interrupted(text: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(token if (at + 1) % (right + 1) else 900 for at, token in enumerate(text))

    server = Server(0.0035, 0.00033)
    plain = max(server.answer(TEXTS, [()] * 8))
    for _ in range(3):
        seconds = max(server.answer(TEXTS, [interrupted(text) for text in TEXTS]))
    assert seconds < 1.02 * plain


def test_wrong_predictions_of_one_client_do_not_affect_others() -> None:
    """Seven requests with wrong predictions run beside one with a right prediction, several times."""
    server = Server()
    right = server.answer(TEXTS, [TEXTS[0], *[()] * 7])[0]
    for _ in range(5):
        beside = server.answer(TEXTS, [TEXTS[0], *map(wrong, TEXTS[1:])])[0]
    assert beside < 1.05 * right
