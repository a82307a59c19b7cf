"""Invariants after each event, at the end of each request, and at the end of a simulation."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

from coordinator.scheduling.records import FAILURES_TO_FAIL
from coordinator.serving.auditor import DIFFERENT
from simulator.setup import WITHDRAWN
from specpool.protocol.errors import StalledStreamError, WorkerFailedError

if TYPE_CHECKING:
    from simulator.clients import Outcome
    from simulator.faults import Faults
    from simulator.simulation import Simulation


def check_structures(simulation: "Simulation") -> None:
    """Check the bookkeeping of the queue, of all windows and of all caches."""
    _check(simulation, simulation.coordinator.queue.check_integrity)
    for lane in simulation.coordinator.lanes._lanes:
        window = lane.window
        # A target that restarts with fewer slots shrinks the window and the cache below what is in use.
        places, capacity = max(window.max_num_seqs, window.occupied), window.pages.capacity
        pages = max(capacity.pages, window.pages.used) if capacity.pages else 0
        with (
            mock.patch.object(window, "max_num_seqs", places),
            mock.patch.object(window.pages, "capacity", replace(capacity, pages=pages)),
        ):
            _check(simulation, window.check_integrity)
    for worker in simulation.workers:
        for engine in worker.engines:
            _check(simulation, engine.slots.check_integrity)


def _check(simulation: "Simulation", check: Callable[[], None]) -> None:
    try:
        check()
    except AssertionError as error:
        simulation.fail(str(error))


def check_ends(simulation: "Simulation", faults: "Faults") -> None:
    """Check that all requests have ended, that the faults justify every error, and that no audit found a difference."""
    for name, client in simulation.clients.items():
        outcome = client.outcome
        if not outcome.end:
            simulation.fail(f"{name} never ended; it has {sum(map(len, outcome.delivered))} tokens")
        elif outcome.error is not None and not _is_justified(outcome, faults):
            simulation.fail(f"{name} ended with {outcome.error!r}")
    if simulation.scenario.settings.get("draft_share") == WITHDRAWN:
        for worker in simulation.workers:
            if worker.setup.name == "new" and any(engine.passes for engine in worker.engines):
                simulation.fail("a withdrawn draft has drafted")
    if different := simulation.coordinator.auditor.results[DIFFERENT]:
        simulation.fail(f"{different} audits found other tokens")


def _is_justified(outcome: "Outcome", faults: "Faults") -> bool:
    """Whether an error is documented for the faults that happened."""
    if isinstance(outcome.error, StalledStreamError):
        return bool(outcome.request.reads_slowly)
    # A refusal is answered by a retry of each sequence alone, so two suffice to end a request.
    enough = 2 if "refused" in str(outcome.error) else FAILURES_TO_FAIL
    return isinstance(outcome.error, WorkerFailedError) and faults.number_since(outcome.sent) >= enough


def leaks(simulation: "Simulation") -> list[str]:
    """Sequences that are still in a window or hold slots. None may remain after the last request."""
    coordinator = simulation.coordinator
    is_empty = coordinator.queue.is_empty and not any(lane.window.occupied for lane in coordinator.lanes._lanes)
    found = [] if is_empty else ["sequences are left"]
    for worker in simulation.workers:
        name = f"the {worker.setup.role} at {worker.setup.address}"
        if not worker.engines:
            found.append(f"{name} is down")
        for engine in worker.engines:
            if count := len(engine.slots._slots):
                found.append(f"{name} still holds {count} slots")
    return found


def check_no_tasks(simulation: "Simulation") -> None:
    """Check that everything has stopped."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        simulation.fail(f"a task is left: {task.get_coro()!r}")
