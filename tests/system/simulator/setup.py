"""Setup of a simulation: workers, settings, and a plain list of events, all drawn from a seed or shrunk."""

from dataclasses import dataclass
from typing import Any

from simulator.model import ToyPair

FORGET_DRAFT = "forget_draft"
"""A fault: a target loses the caches of the draft that it carries."""
WITHDRAWN = "new=0"
"""Shares with which the draft named "new" gets no sequences."""


@dataclass(frozen=True)
class WorkerSetup:
    """A worker."""

    role: str
    """"target" or "draft"."""
    address: str
    slots: int
    max_model_len: int
    columns: int
    """Positions of its KV cache."""
    device: str
    base_seconds: float
    row_seconds: float
    draft: "WorkerSetup | None" = None
    """The draft that a target carries."""
    weights: tuple[str, ...] = ("toy",)
    """Fingerprints of the weights, used by successive lives in a cycle."""
    name: str = ""
    """The operator's name for the draft."""
    agreement: float | None = None
    """Agreement of the draft with the target; None: that of the pair."""

    @property
    def entry(self) -> str:
        """Entry for the worker in the coordinator's settings."""
        return f"{self.name}={self.address}" if self.name else self.address

    def pass_seconds(self, rows: int) -> float:
        """Duration of a pass."""
        return self.base_seconds + self.row_seconds * rows


@dataclass(frozen=True)
class Request:
    """A client sends a request. Times are in seconds."""

    at: float
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    client: str = ""
    n: int = 1
    seed: int = 0
    """0: greedy."""
    k: int | None = None
    """None: adaptive."""
    method: str = "best"
    salt: str = ""
    prediction: tuple[int, ...] = ()
    leaves_after: float | None = None
    """Deadline, or when the client cancels."""
    reads_slowly: float = 0.0
    """Pause of the client after the first tokens."""


@dataclass(frozen=True)
class Fault:
    """Something goes wrong."""

    at: float
    kind: str
    worker: int = 0
    """Index among the workers."""
    seconds: float = 0.0
    number: int = 1
    """Messages, answers, slots or a factor."""
    name: str = ""
    """The request to abort, or how to spoil answers."""


Event = Request | Fault


@dataclass(frozen=True)
class Scenario:
    """A simulation, fully determined."""

    seed: int
    pair: ToyPair
    workers: tuple[WorkerSetup, ...]
    settings: dict[str, Any]
    """Of the coordinator."""
    events: tuple[Event, ...]

    @property
    def requests(self) -> list[Request]:
        return [event for event in self.events if isinstance(event, Request)]

    @property
    def has_standby(self) -> bool:
        """Whether the second of two targets stands by, instead of serving beside the first."""
        return len(self.targets()) == 2 and self.seed % 2 == 0

    def targets(self) -> list[int]:
        """Indices of the target workers."""
        return [index for index, worker in enumerate(self.workers) if worker.role == "target"]
