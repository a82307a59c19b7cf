"""Runs a scenario: starts everything, lets the events happen, then checks that all requests end and nothing is left."""

import asyncio
import gc
import logging
import random
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from unittest import mock

from coordinator.config.settings import CoordinatorSettings
from coordinator.prompts.description import TokenizerDescription
from coordinator.prompts.detokenizer import Vocabulary
from coordinator.serving.coordinator import Coordinator
from simulator import invariants
from simulator.clients import Client
from simulator.clock import VirtualLoop, virtual_time
from simulator.faults import Faults
from simulator.model import EOS
from simulator.network import Network
from simulator.setup import Request, Scenario
from simulator.workers import Worker
from specpool.protocol.tokenizer import TokenizerFiles

START_SECONDS = 2.0
"""Time for the links to connect before the first event."""
ANSWER_SECONDS = 90.0
"""Time for all requests to end after the last fault."""
RELEASE_SECONDS = 40.0
"""Time for all slots to be free after the last request. A draft worker may rest for most of it."""
END_SECONDS = 1.0
POLL_SECONDS = 0.1
MAX_UNREAD = 12
"""Unread tokens after which a sample pauses."""

gc.freeze()  # collections need not scan torch
TOKENIZER = TokenizerDescription(
    TokenizerFiles(b"toy", "", {}, (EOS,)), 1, None, None, Vocabulary({}, frozenset(), "".join)
)


@dataclass
class Result:
    """Results of one or more simulations."""

    number: int = 1
    """Number of simulations."""
    violations: list[str] = field(default_factory=list)
    requests: int = 0
    faults: int = 0
    """Faults that had something to affect."""
    tokens: int = 0
    messages: int = 0
    virtual_seconds: float = 0.0
    seconds: Counter[str] = field(default_factory=Counter)
    """Total duration of requests, by client."""
    ends: Counter[str] = field(default_factory=Counter)
    audits: Counter[str] = field(default_factory=Counter)
    """Results of audits."""
    digest: str = ""
    """Of all messages with their times, and of all outcomes."""

    def add(self, other: "Result") -> None:
        """Add another result."""
        self.violations += other.violations
        self.digest = sha256((self.digest + other.digest).encode()).hexdigest()
        for name in ("number", "requests", "faults", "tokens", "messages", "virtual_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds.update(other.seconds)
        self.ends.update(other.ends)
        self.audits.update(other.audits)


class Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, loop: VirtualLoop) -> None:
        self.scenario, self.result = scenario, Result()
        self._loop, rng = loop, random.Random(f"network {scenario.seed}")
        self._network = Network(loop, rng, lambda path, error: self.fail(f"{path} failed: {error!r}"))
        self.workers = [Worker(setup, scenario.pair, self._network, rng) for setup in scenario.workers]
        self.coordinator: Coordinator
        self.clients: dict[str, Client] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._failed = asyncio.Event()

    def fail(self, problem: str) -> None:
        """Report a violation, which ends the simulation."""
        self.result.violations.append(f"{self._loop.time():.3f} s: {problem}")
        self._failed.set()

    async def run(self) -> None:
        """Run the scenario until its end or the first violation."""
        with mock.patch("grpc.aio.insecure_channel", self._network.channel):
            self.coordinator = Coordinator(self._settings())
        with mock.patch("grpc.aio.insecure_channel", self._network.channel):  # links reconnect
            await self._run()

    async def _run(self) -> None:
        coordinator = self.coordinator
        coordinator.tokenizers.load = _load_tokenizer  # type: ignore[method-assign]
        for worker in self.workers:
            worker.start()
        serving = asyncio.create_task(coordinator.run())
        events = asyncio.create_task(self._live())
        failed = asyncio.create_task(self._failed.wait())
        await asyncio.wait([serving, events, failed], return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, events):
            if task.done() and task.exception() is not None:
                self.fail(f"stopped by {task.exception()!r}")
        for task in (events, failed, serving, *self._tasks):
            task.cancel()
        await asyncio.wait([events, failed, serving, *self._tasks])
        await coordinator.close()
        for worker in self.workers:
            worker.stop()
        if not self.result.violations:
            await asyncio.sleep(END_SECONDS)
            invariants.check_no_tasks(self)
        self._conclude()

    async def _live(self) -> None:
        await asyncio.sleep(START_SECONDS)
        faults = Faults(self, self._network)
        for event in self.scenario.events:
            await asyncio.sleep(max(0.0, START_SECONDS + event.at - self._loop.time()))
            if isinstance(event, Request):
                self._send(event)
            else:
                self.result.faults += faults.happen(event)
            invariants.check_structures(self)
        faults.heal()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ANSWER_SECONDS)
        invariants.check_ends(self, faults)
        await self._wait_released()
        invariants.check_structures(self)

    async def _wait_released(self) -> None:
        """Wait until nothing holds a slot, or report what does."""
        deadline = self._loop.time() + RELEASE_SECONDS
        while invariants.leaks(self) and self._loop.time() < deadline:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(POLL_SECONDS)
        for leak in invariants.leaks(self):
            self.fail(leak)

    def _send(self, request: Request) -> None:
        client = self.clients[request.name] = Client(self.coordinator, self.scenario.pair, request, self.fail)
        self._tasks.append(asyncio.create_task(client.run(), name=request.name))
        self._tasks[-1].add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.fail(f"{task.get_name()} raised {task.exception()!r}")

    def _settings(self) -> CoordinatorSettings:
        addresses = {role: [w.entry for w in self.scenario.workers if w.role == role] for role in ("target", "draft")}
        targets, standby = addresses["target"], None
        if self.scenario.has_standby:
            targets, (standby,) = targets[:1], targets[1:]
        return CoordinatorSettings(
            port=0,
            target_address=",".join(targets),
            target_standby_address=standby,
            draft_address=",".join(addresses["draft"]) or None,
            **self.scenario.settings,
        )

    def _conclude(self) -> None:
        result, outcomes = self.result, [client.outcome for client in self.clients.values()]
        result.requests = len(outcomes)
        result.faults += sum(worker.tampering.spoiled for worker in self.workers)
        for outcome in outcomes:
            result.seconds[outcome.request.client] += outcome.seconds
        result.ends.update(outcome.end or "unfinished" for outcome in outcomes)
        result.audits.update(self.coordinator.auditor.results)
        result.tokens = sum(len(tokens) for outcome in outcomes for tokens in outcome.delivered)
        result.messages, result.virtual_seconds = self._network.messages, self._loop.time()
        digest = self._network.digest
        digest.update(repr([(outcome.end, outcome.delivered) for outcome in outcomes]).encode())
        result.digest = digest.hexdigest()


async def _load_tokenizer(files: TokenizerFiles, vocab_size: int, reasoning_tags: str) -> TokenizerDescription:
    """Stands in for the prompt processes."""
    return TOKENIZER


async def _cancel_others() -> None:
    """Cancel all tasks that a violation has left."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def simulate(scenario: Scenario) -> Result:
    """Run a scenario."""
    gc.disable()  # finalizers must not run at random times
    loop = VirtualLoop()
    try:
        with virtual_time(loop, scenario.seed), _errors_logged() as logged, _few_unread():
            simulation = Simulation(scenario, loop)
            loop.run_until_complete(simulation.run())
            loop.run_until_complete(_cancel_others())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
    finally:
        gc.enable()
        gc.collect()
    result = simulation.result
    result.violations += [f"logged: {record}" for record in logged]
    result.violations += [f"unhandled: {context.get('exception') or context['message']!r}" for context in loop.errors]
    return result


def simulate_all(scenarios: Iterable[Scenario]) -> tuple[Result, Scenario | None]:
    """Simulate until the first violation. Return the totals, and the scenario that failed."""
    totals = Result(number=0)
    for scenario in scenarios:
        totals.add(simulate(scenario))
        if totals.violations:
            return totals, scenario
    return totals, None


@contextmanager
def _few_unread() -> Iterator[None]:
    with mock.patch("coordinator.requests.generation.MAX_UNREAD", MAX_UNREAD):
        yield


@contextmanager
def _errors_logged() -> Iterator[list[str]]:
    """The exceptions that are logged. Nothing is printed."""
    logged: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                logged.append(f"{record.getMessage()}: {record.exc_info[1]!r}{_place(record.exc_info[1])}")

    root, handler = logging.getLogger(), Handler(logging.ERROR)
    before, level = root.handlers, root.level
    root.handlers = [handler]
    root.setLevel(logging.ERROR)
    try:
        yield logged
    finally:
        root.handlers = before
        root.setLevel(level)


def _place(error: BaseException | None) -> str:
    """Where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return "".join(f" < {frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in reversed(frames))
