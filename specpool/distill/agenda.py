"""Order and random numbers of dialogues. They are deterministic, so a resumed run generates the same dialogues."""

from collections import deque
from collections.abc import Iterable

import torch

MASK = 2**32 - 1


class Agenda:
    """Hands out dialogue numbers in ascending order. A dialogue can use answers at least `lag` numbers earlier."""

    def __init__(self, numbers: Iterable[int], lag: int) -> None:
        self.lag = lag
        self._waiting = deque(numbers)
        self._running: set[int] = set()

    def take(self) -> int | None:
        """Return the next dialogue to begin. None if none is left, or if it must wait for earlier answers."""
        if not self._waiting or any(number < self._waiting[0] - self.lag for number in self._running):
            return None
        number = self._waiting.popleft()
        self._running.add(number)
        return number

    def end(self, number: int) -> None:
        """Record that a dialogue is complete."""
        self._running.remove(number)


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Return exponential samples [B, count] that depend only on seeds [B] and positions [B]."""
    places = torch.arange(1, count + 1, device=seeds.device)
    mixed = _hash(_hash(seeds + 0x9E3779B9 * positions)[:, None] + 0x85EBCA6B * places)
    return -((mixed.double() + 0.5) / 2**32).log().float()


def _hash(values: torch.Tensor) -> torch.Tensor:
    """Hash to 32 bits (lowbias32 by Wellons). Products wrap in int64, which keeps the low bits."""
    values = values & MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        values = ((values ^ (values >> shift)) * factor) & MASK
    return values ^ (values >> 16)
