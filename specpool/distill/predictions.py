"""Which tokens of its target's answers a loaded draft predicts."""

import torch

from specpool.distill.replay import REPORTED_K, Prediction
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine


def target_states(target: Engine, token_ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Hidden states [tokens, width] of the target after these numbers of layers, as precise as on the wire."""
    span = Span(0, 0, token_ids, 0, num_states=len(token_ids))
    return target.forward_with_states([span], layers)[1].float()


@torch.inference_mode()
def predict_answer(draft: Engine, token_ids: list[int], answer_start: int, states: torch.Tensor | None) -> Prediction:
    """What the draft predicts of each token of an answer, by draft step.

    The steps of a causal draft do not differ, so there is one. `states`: those that a feature draft reads, of all
    tokens. It has max(REPORTED_K) steps, and steps after a wrong token count as wrong.
    """
    if states is not None:
        return _predict_by_step(draft, token_ids, answer_start, states)
    chosen, confidences = _choices(draft, Span(0, 0, token_ids[:-1], len(token_ids) - answer_start))
    agreed = [token == right for token, right in zip(chosen, token_ids[answer_start:], strict=True)]
    return Prediction([agreed], [confidences])


def _predict_by_step(draft: Engine, tokens: list[int], start: int, states: torch.Tensor) -> Prediction:
    agreed, cached = [[False] * (len(tokens) - start) for _ in REPORTED_K], 0
    confidences = [[0.0] * (len(tokens) - start) for _ in REPORTED_K]
    for position in range(start, len(tokens)):
        before = states[max(0, cached - 1) : position - 1]
        span = Span(0, cached, tokens[cached:position], 1, states=before)
        for step, expected in enumerate(tokens[position : position + len(agreed)]):
            (token,), (confidence,) = _choices(draft, span)
            confidences[step][span.end - start] = confidence
            if token != expected:
                break
            agreed[step][span.end - start] = True
            assert draft.own_states is not None
            span = Span(0, span.end, [token], 1, own_states={0: draft.own_states[0]})
        cached = position
    return Prediction(agreed, confidences)


def _choices(draft: Engine, span: Span) -> tuple[list[int], list[float]]:
    """The draft's choice at each requested position, and its probability."""
    logits = draft.forward([span]).float()
    best, chosen = logits.max(-1)
    token_ids: list[int] = draft.head.token_ids(chosen).tolist()
    confidences: list[float] = (best - logits.logsumexp(-1)).exp().tolist()
    return token_ids, confidences
