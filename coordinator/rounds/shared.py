"""What the rounds of all windows share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.config.settings import CoordinatorSettings
from coordinator.requests.in_flight import RequestsInFlight
from coordinator.requests.traces import Traces
from coordinator.scheduling.counters import Counters
from coordinator.scheduling.request_queue import RequestQueue
from specpool.drafting.lookup import PromptLookup


@dataclass(frozen=True)
class Shared:
    """What the rounds of all windows share."""

    settings: CoordinatorSettings
    queue: RequestQueue
    in_flight: RequestsInFlight
    traces: Traces
    lookup: PromptLookup
    on_admission: Callable[[], None]
    """Called before sequences are admitted."""
    counters: Counters = field(default_factory=Counters)
