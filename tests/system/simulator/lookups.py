"""Draws input for lookups: right, wrong and hostile predictions, and requests that repeat earlier ones."""

import random
from collections.abc import Sequence
from dataclasses import replace

from simulator.model import EOS, ToyPair
from simulator.setup import Event, Request

METHODS = ("model", "model", "best", "best", "ngram", "suffix")
LONG_PREDICTION = 2000
REPEATS = 0.3
"""Share of requests that repeat an earlier one."""


def with_lookups(rng: random.Random, pair: ToyPair, events: Sequence[Event]) -> list[Event]:
    """Return the events, with methods, salts, repeated prompts and predictions for their requests."""
    drawn: list[Event] = []
    earlier: list[Request] = []
    for event in events:
        if isinstance(event, Request):
            earlier.append(_with_prediction(rng, pair, _repeated(rng, event, earlier)))
            drawn.append(earlier[-1])
        else:
            drawn.append(event)
    return drawn


def _repeated(rng: random.Random, request: Request, earlier: Sequence[Request]) -> Request:
    request = replace(request, method=rng.choice(METHODS), salt=rng.choice(["", "salt", "salt", "other"]))
    if not earlier or rng.random() >= REPEATS:
        return request
    former = rng.choice(earlier)
    return replace(request, prompt=former.prompt, max_tokens=former.max_tokens, n=former.n, seed=former.seed)


def _with_prediction(rng: random.Random, pair: ToyPair, request: Request) -> Request:
    kind = rng.choice([None, None, "right", "edited", "edited", "random", "loop", "prompt"])
    if kind is None:
        return request
    answer = pair.answer(request.prompt, request.max_tokens, request.seed)
    prediction = {
        "right": answer,
        "edited": edited(rng, answer),
        "random": [rng.randrange(EOS) for _ in range(rng.choice([1, 8, LONG_PREDICTION]))],
        "loop": [rng.randrange(EOS)] * LONG_PREDICTION,
        "prompt": [*request.prompt] * 20,  # matches in many places, but never continues like the answer
    }[kind]
    return replace(request, method=rng.choice(["prediction", "best"]), prediction=tuple(prediction))


def edited(rng: random.Random, answer: Sequence[int]) -> list[int]:
    """Replace, remove and add some tokens."""
    tokens = list(answer)
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(tokens) + 1)
        tokens[start : start + rng.randint(0, 3)] = [rng.randrange(EOS) for _ in range(rng.randint(0, 3))]
    return tokens
