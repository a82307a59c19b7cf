"""Tokens over time: rates, pauses, and a plot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

BIN_SECONDS = 0.5


@dataclass
class Timeline:
    """Times at which tokens reached the client, in seconds."""

    _arrivals: list[tuple[float, int]] = field(default_factory=list)

    def add(self, at: float, tokens: int) -> None:
        """Record an arrival; `at` never decreases."""
        self._arrivals.append((at, tokens))

    def tokens(self, began: float, ended: float) -> int:
        """Tokens that arrived in this time."""
        return sum(tokens for at, tokens in self._arrivals if began <= at < ended)

    def longest_pause(self, began: float, ended: float) -> float:
        """Seconds of the longest pause in this time."""
        times = [began, *(at for at, tokens in self._arrivals if tokens and began <= at < ended), ended]
        return max(later - earlier for earlier, later in pairwise(times))

    def rates(self, ended: float) -> list[float]:
        """Tokens per second in each full interval of BIN_SECONDS from 0 to `ended`."""
        bins = [0] * math.floor(ended / BIN_SECONDS)
        for at, tokens in self._arrivals:
            if (index := int(at / BIN_SECONDS)) < len(bins):
                bins[index] += tokens
        return [tokens / BIN_SECONDS for tokens in bins]


@dataclass(frozen=True)
class Event:
    """A disturbance; times in seconds on the same clock."""

    name: str
    began: float
    ended: float

    @property
    def rounded(self) -> dict[str, Any]:
        """The event for a report."""
        return {"name": self.name, "began": round(self.began, 1), "ended": round(self.ended, 1)}


def throughput_figure(rates: Sequence[float], events: Sequence[Event]) -> Figure:
    """Tokens per second over time; disturbances are shaded."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.step([index * BIN_SECONDS for index in range(len(rates))], rates, where="post", linewidth=1)
    for color, event in enumerate(events, start=1):
        axes.axvspan(event.began, event.ended, color=f"C{color}", alpha=0.25, label=event.name)
    axes.set(xlabel="seconds", ylabel="tokens/s", ylim=(0, None), xlim=(0, len(rates) * BIN_SECONDS))
    axes.legend(fontsize="x-small", ncols=len(events), loc="upper center", bbox_to_anchor=(0.5, 1.12))
    return figure
