"""Shrinks a failing scenario: removes events, workers and settings while it still fails (delta debugging)."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from simulator.setup import Event, Request, Scenario

MAX_SECONDS = 60.0
"""Real time for shrinking a scenario."""


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], max_seconds: float = MAX_SECONDS) -> Scenario:
    """A smaller scenario that still fails."""
    deadline = time.monotonic() + max_seconds

    def still_fails(smaller: Scenario) -> bool:
        return time.monotonic() < deadline and fails(smaller)

    scenario = _without_events(scenario, still_fails)
    for smaller in _simpler(scenario):
        if still_fails(smaller):
            scenario = smaller
    return scenario


def _without_events(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Remove ever smaller parts of the events while the rest still fails."""
    events, size = list(scenario.events), len(scenario.events) // 2
    while size:
        start = 0
        while start < len(events):
            rest = [*events[:start], *events[start + size :]]
            if fails(replace(scenario, events=tuple(rest))):
                events = rest
            else:
                start += size
        size //= 2
    return replace(scenario, events=tuple(events))


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with one simpler request."""
    for index, event in enumerate(scenario.events):
        if isinstance(event, Request):
            for simpler in (
                replace(event, n=1),
                replace(event, prediction=(), method="best"),
                replace(event, prompt=event.prompt[:1]),
            ):
                yield replace(scenario, events=_replaced(scenario.events, index, simpler))


def _replaced(events: tuple[Event, ...], index: int, event: Event) -> tuple[Event, ...]:
    return (*events[:index], event, *events[index + 1 :])
