"""The common part of the fake draft worker and the draft that a fake target carries."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specpool.testing.fake_grammars import EOS_TOKEN_ID, VOCAB_SIZE
from specpool.testing.fake_worker import FakeWorker, Key


class FakeDrafter(FakeWorker):
    """Drafts the target's choice with probability `acceptance`, and another token otherwise."""

    def __init__(self, acceptance: float = 0.7, **knobs: Any) -> None:
        super().__init__(**knobs)
        self.acceptance = acceptance
        self._rng = random.Random(0)

    def drafts_for(
        self, choose_legal: Callable[[Sequence[int], str, int], int], grammars: Mapping[Key, tuple[str, int]]
    ) -> None:
        """Draft for a target. `choose_legal`: chooses its tokens. `grammars`: grammar and prompt length by sequence."""
        self._choose_legal, self._followed = choose_legal, grammars

    def choose(self, key: Key, context: Sequence[int]) -> int:
        """Return the target's choice after a context, or an arbitrary token if the context is illegal."""
        try:
            return self._choose_legal(context, *self._followed[key])
        except ValueError:
            return EOS_TOKEN_ID

    def draft(self, key: Key, context: Sequence[int], length: int) -> list[int]:
        """Draft `length` tokens after a context."""
        draft: list[int] = []
        for _ in range(length):
            choice = self.choose(key, [*context, *draft])
            draft.append(choice if self._rng.random() < self.acceptance else (choice + 1) % VOCAB_SIZE)
        return draft

    def confidences(self, item: Any, draft: Sequence[int]) -> list[float]:
        """Return the draft's probability of each token, if the item has a minimum."""
        return [self.acceptance] * len(draft) if item.min_chance else []

    def draft_lengths(self, items: Sequence[tuple[Any, int]], step_cost: float) -> list[int]:
        """Return the number of draft tokens per item: its maximum, or fewer if another token gains too little.

        `items`: messages with `min_chance` and `next_chance`, each with its maximum.
        """
        lengths = [min(1, maximum) for _, maximum in items]
        for step in range(1, max((maximum for _, maximum in items), default=0)):
            gains = {
                index: gain
                for index, (item, maximum) in enumerate(items)
                if maximum > step == lengths[index] and (gain := self._gain(item, step)) >= 0
            }
            if not gains or sum(gains.values()) < step_cost:
                break
            for index in gains:
                lengths[index] += 1
        return lengths

    def _gain(self, item: Any, step: int) -> float:
        next_chance = item.next_chance if item.HasField("next_chance") else 1.0
        return self.acceptance**step * next_chance - item.min_chance if item.min_chance else math.inf
