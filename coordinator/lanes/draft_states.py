"""Draft model states over all lanes, for the server's information and metrics."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from coordinator.lanes.lane import Lane
from coordinator.workers.draft_registry import FINGERPRINT_DIGITS
from specpool.drafting.draft_models import DraftKey


@dataclass
class DraftModelState:
    """State of a draft model over all lanes. `specpool.v1.DraftModelState` documents the fields."""

    name: str
    model: str
    weights_fingerprint: str
    share: float = 0.0
    running: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    rounds: int = 0
    completion_tokens: int = 0
    expected_tokens_per_s: float = 0.0
    ready_workers: int = 0


def draft_states(lanes: Iterable[Lane]) -> list[DraftModelState]:
    """Return the state of each draft model, oldest first. Idle lanes, except the first, do not add expected speed."""
    states: dict[DraftKey, DraftModelState] = {}
    num_drafting = 0
    for number, lane in enumerate(lane for lane in lanes if lane.draft is not None):
        num_drafting += _add(states, lane, counts_speed=not number or lane.window.occupied > 0)
    taken: set[str] = set()
    for (_, fingerprint), state in states.items():
        state.share /= max(1, num_drafting)
        while state.name in taken:  # lanes may discover the workers of a rolling update in different orders
            state.name = f"{state.name} ({fingerprint[:FINGERPRINT_DIGITS]})"
        taken.add(state.name)
    return [*states.values()]


def _add(states: dict[DraftKey, DraftModelState], lane: Lane, *, counts_speed: bool) -> bool:
    """Add the draft models of a lane. Return whether any is ready."""
    assert lane.draft is not None
    roster, drafting = lane.draft.roster, lane.drafting
    ready, speeds = roster.models, drafting.speeds
    drafting.shares.update(ready, speeds)
    running = [s.draft.model for s in chain(lane.window.members, lane.window.in_round.values()) if s.finish is None]
    for model in roster.known_models:
        state = states.setdefault(model.key, DraftModelState(model.name, model.model, model.key[1]))
        state.share += model.share
        state.running += running.count(model)
        state.draft_tokens += model.draft_tokens
        state.accepted_draft_tokens += model.accepted_draft_tokens
        state.rounds += model.rounds
        state.completion_tokens += model.completion_tokens
        state.expected_tokens_per_s += speeds.expected(model) if counts_speed else 0.0
        state.ready_workers += sum(link.is_ready and link.model is model for link in lane.draft.links)
    return bool(ready)
