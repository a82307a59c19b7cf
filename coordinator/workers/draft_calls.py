"""Calls to several draft workers in a round. A slow or failing worker costs only the drafts of its own sequences."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

from coordinator.workers.draft_link import DraftLink
from coordinator.workers.interface import WorkerRefusedError, WorkerUnreachableError
from specpool.drafting.acceptance import expected_tokens
from specpool.drafting.costs import Timed
from specpool.drafting.draft_models import DraftModel
from specpool.drafting.outcome import draft_steps
from specpool.protocol.rounds import Proposal, ProposeItem

log = logging.getLogger(__name__)

MAX_SLOWDOWN, MIN_PATIENCE_SECONDS = 4.0, 0.02
"""Wait for the other drafts: up to `MAX_SLOWDOWN` times the main draft's duration, and at least a minimum."""
MAX_SLOWDOWN_AHEAD = 1.5
"""The same for drafting during a verification, relative to its duration. Later branches would be useless."""
WAIT_SHARE = 0.02
"""Maximum share of all time to wait for other drafts without a gain in return."""
MAX_PAUSE_SECONDS = 1.0
"""Maximum time between rounds that counts towards `WAIT_SHARE`, because idle rounds cannot wait."""

Parts = dict[DraftLink, list[ProposeItem]]
"""Items of a round by draft worker."""
Call = asyncio.Task[tuple[list[Proposal], Timed]]


class DraftCalls:
    """Sends each draft worker its part of a round. Waits a bounded time for all but the main draft."""

    def __init__(self, on_late_end: Callable[[DraftLink, Iterable[int]], None]) -> None:
        """`on_late_end`: called with the worker and the sequence ids of a late call when it ends."""
        self._on_late_end = on_late_end
        self._late: dict[Call, DraftLink] = {}
        """Calls that no round waits for. A worker may have several, because rounds may overlap."""
        self._debt = self._began = 0.0
        """Seconds waited in vain beyond `WAIT_SHARE`, and the start of the last round."""

    def is_late(self, link: DraftLink) -> bool:
        """Whether a worker still runs a late call. It gets no new calls until that ends."""
        return link in self._late.values()

    async def send(
        self,
        round_id: int,
        parts: Parts,
        step_cost: float,
        traceparent: str,
        *,
        slack: float,
        speed: float,
        learns: bool,
    ) -> tuple[dict[DraftLink, list[Proposal]], Timed, list[BaseException]]:
        """Return the proposals of each worker that answers in time, the duration of the round, and the errors.

        The main draft is the one with the most sequences. Its slowest worker sets the duration, unless all of its
        workers fail. Other drafts are skipped while rounds have waited in vain for too long.

        `slack`: seconds of the verification that runs at the same time; 0: none. `speed`: tokens per second of all
        sequences. `learns`: whether to learn each worker's step times here.
        """
        main = _main(parts)
        if self._is_in_debt():
            parts = {link: own for link, own in parts.items() if link.model is main}
        calls = {
            link: asyncio.ensure_future(link.propose(round_id, own, chances(link), step_cost, traceparent))
            for link, own in parts.items()
        }
        waited = await _answered(main, calls, slack)
        gain = sum(_gain(link, own) for link, own in parts.items() if link.model is not main and calls[link].done())
        self._debt += max(0.0, waited - slack - gain / speed) if speed else 0.0
        answers, durations, failures = dict[DraftLink, list[Proposal]](), [(False, 0.0, Timed())], list[BaseException]()
        for link, own in parts.items():
            if not calls[link].done():
                _observe(link, is_answered=False)
                self._late[calls[link]] = link
                calls[link].add_done_callback(partial(self._late_call_ended, link, own))
            elif (error := calls[link].exception()) is not None:
                failures.append(error)
                _failed(link, error)
            else:
                answers[link], timed = calls[link].result()
                _observe(link, is_answered=True)
                if learns:
                    link.step_times.observe_steps(draft_steps(own, answers[link]), timed.forward)
                durations.append((link.model is main, timed.elapsed, timed))
        return answers, replace(max(durations, key=itemgetter(0, 1))[-1], waited=waited), failures

    def _is_in_debt(self) -> bool:
        """Return whether rounds have waited too long for other drafts. Call once per round."""
        began = asyncio.get_running_loop().time()
        self._debt = max(0.0, self._debt - WAIT_SHARE * min(MAX_PAUSE_SECONDS, began - self._began))
        self._began = began
        return self._debt > 0

    def _late_call_ended(self, link: DraftLink, own: list[ProposeItem], call: Call) -> None:
        del self._late[call]
        if call.cancelled():
            return
        if (error := call.exception()) is not None:
            _failed(link, error)
        else:
            proposals, timed = call.result()
            link.step_times.observe_steps(draft_steps(own, proposals), timed.forward)
        self._on_late_end(link, (item.sequence_id for item in own))

    def cancel(self) -> None:
        """Cancel all late calls."""
        for call in [*self._late]:
            call.cancel()


def _main(parts: Parts) -> DraftModel | None:
    """Return the draft with the most sequences."""
    sizes: Counter[DraftModel | None] = Counter()
    for link, own in parts.items():
        sizes[link.model] += len(own)
    return max(sizes, key=sizes.__getitem__, default=None)


def _gain(link: DraftLink, items: Iterable[ProposeItem]) -> float:
    """Return the expected gain in tokens from drafts for these items."""
    rate = link.model.evidence.rate.mean if link.model is not None else 0.0
    return sum(expected_tokens(rate, item.num_draft_tokens) - 1 for item in items)


async def _answered(main: DraftModel | None, calls: Mapping[DraftLink, Call], slack: float) -> float:
    """Wait for the main draft's calls, then a bounded time for the others. Return the seconds of the second wait."""
    clock = asyncio.get_running_loop().time
    mains, began = [call for link, call in calls.items() if link.model is main], clock()
    try:
        if mains:
            await asyncio.wait(mains)
        elapsed = clock() - began
        if others := [call for call in calls.values() if not call.done()]:
            patience = max(MIN_PATIENCE_SECONDS, (MAX_SLOWDOWN - 1) * elapsed)
            if slack:
                patience = max(0.0, MAX_SLOWDOWN_AHEAD * slack - elapsed)
            await asyncio.wait(others, timeout=patience)
            return clock() - began - elapsed
    except asyncio.CancelledError:
        for call in calls.values():
            call.cancel()
        raise
    return 0.0


def _observe(link: DraftLink, *, is_answered: bool, is_failure: bool = False) -> None:
    if link.model is not None:
        link.model.observe_call(is_answered=is_answered, is_failure=is_failure)


def _failed(link: DraftLink, error: BaseException) -> None:
    _observe(link, is_answered=False, is_failure=True)
    if not isinstance(error, WorkerUnreachableError | WorkerRefusedError):  # the link logs these
        log.error("proposal of the draft worker at %s failed", link.address, exc_info=error)


def chances(link: DraftLink) -> Sequence[float]:
    """Return the acceptance probabilities of the worker's model by draft probability."""
    return link.model.calibration.chances if link.model is not None else ()
