"""The order of dialogues, and their random numbers: an interrupted run continues to the same dialogues."""

from collections import deque
from collections.abc import Iterable

import torch

MASK = 2**32 - 1


class Agenda:
    """Numbers of dialogues to write, ascending. A dialogue can refer to answers that precede it by at least `lag`."""

    def __init__(self, numbers: Iterable[int], lag: int) -> None:
        self.lag = lag
        self._waiting = deque(numbers)
        self._running: set[int] = set()

    def take(self) -> int | None:
        """The next dialogue to begin; None if there is none, or if answers before it are missing."""
        if not self._waiting or any(number < self._waiting[0] - self.lag for number in self._running):
            return None
        number = self._waiting.popleft()
        self._running.add(number)
        return number

    def end(self, number: int) -> None:
        """Record that a dialogue is complete."""
        self._running.remove(number)


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Samples [B, count] of the exponential distribution, which depend only on seed [B] and position [B]."""
    places = torch.arange(1, count + 1, device=seeds.device)
    mixed = _hash(_hash(seeds + 0x9E3779B9 * positions)[:, None] + 0x85EBCA6B * places)
    return -((mixed.double() + 0.5) / 2**32).log().float()


def _hash(values: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer hash (Wellons, lowbias32). Multiplications wrap in int64, which keeps the low bits."""
    values = values & MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        values = ((values ^ (values >> shift)) * factor) & MASK
    return values ^ (values >> 16)
