"""A service under attack: its processes, addresses and credentials."""

import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from edge import command, environment

from benchmarks.cost.fakes import start_fakes, start_process, wait_ready
from specpool.client import AsyncClient
from specpool.rpc.ports import free_port

Kind = Literal["fakes", "workers", "pair"]
"""`fakes`: fake workers, whose target passes take 5 ms and 0.03 ms a row. `workers`: real workers with tiny random
models. `pair`: real workers with the embedded pair."""
NAMES = ("attacker", "victim", "coordinator")
"""Clients with a token."""
PASS_MS, ROW_MS, FAKE_MODEL_LEN, TINY_MODEL_LEN = 5, 0.03, 131_072, 16_384


@dataclass(frozen=True)
class Setup:
    """How to start a service, and how many requests its well-behaved client has in flight."""

    kind: Kind
    flags: tuple[str, ...] = ()
    """Further flags of the coordinator."""
    worker_flags: tuple[str, ...] = ()
    """Further flags of both workers, or of the fakes."""
    victims: int = 1
    edge: bool = False
    """Whether clients reach the coordinator through the edge."""


@dataclass(frozen=True)
class Service:
    """A running service. Every process except the fakes requires a token."""

    coordinator: str
    """Address of the coordinator, or of its edge."""
    health: str
    """Address of its health port."""
    target: str
    draft: str
    pids: dict[str, int]
    """Process ids by role, without the fakes."""
    logs: Path
    """Folder with the log of each process."""
    tokens: dict[str, str]

    def metadata(self, name: str) -> tuple[tuple[str, str], ...]:
        """Metadata of a call with the token of "attacker", "victim" or "coordinator"."""
        return (("authorization", f"Bearer {self.tokens[name]}"),)

    def memory(self) -> dict[str, int]:
        """Resident bytes of each process."""
        return {role: psutil.Process(pid).memory_info().rss for role, pid in self.pids.items()}

    def logged(self) -> int:
        """Bytes logged so far by all processes."""
        return sum(path.stat().st_size for path in self.logs.iterdir())


@asynccontextmanager
async def started(setup: Setup) -> AsyncIterator[Service]:
    """Context manager that starts a service and waits until it is ready."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        service = _start(stack, folder, setup)
        async with AsyncClient(service.coordinator, token=service.tokens["victim"]) as client:
            await wait_ready(client, draft=setup.kind != "fakes")
        yield service


def _start(stack: ExitStack, folder: Path, setup: Setup) -> Service:
    tokens = {name: f"{name}-{os.urandom(16).hex()}" for name in NAMES}
    for name, token in tokens.items():
        (folder / name).write_text(token)
    (folder / "tokens").write_text("".join(f"{name} {token}\n" for name, token in tokens.items()))
    logs = folder / "logs"
    logs.mkdir()
    pids: dict[str, int] = {}

    def start(role: str, module: str, *arguments: str) -> str:
        port = free_port()
        log = stack.enter_context((logs / role).open("w"))
        listening = ["--port", str(port), "--api-tokens", str(folder / "tokens")]
        pids[role] = start_process(stack, "-m", module, *arguments, *listening, stderr=log).pid
        return f"127.0.0.1:{port}"

    if setup.kind == "fakes":
        sizes = ["--max-model-len", str(FAKE_MODEL_LEN), "--pass-ms", str(PASS_MS), "--row-ms", str(ROW_MS)]
        target, draft = start_fakes(stack, *sizes, *setup.worker_flags)
        links = ["--target-address", target]
    else:
        target, draft = (
            start(role, f"{role}_worker.server", "--model", model, *setup.worker_flags)
            for role, model in zip(("target", "draft"), _models(folder, setup.kind), strict=True)
        )
        links = ["--target-address", target, "--draft-address", draft]
    health = free_port()
    links += ["--worker-token", str(folder / "coordinator"), "--health-port", str(health)]
    coordinator = start("coordinator", "coordinator.server", *links, *setup.flags)
    if setup.edge:
        coordinator = _start_edge(stack, coordinator, health)
    return Service(coordinator, f"127.0.0.1:{health}", target, draft, pids, logs, tokens)


def _start_edge(stack: ExitStack, coordinator: str, health_port: int) -> str:
    address = f"127.0.0.1:{free_port()}"
    variables = environment(bind=address, coordinator=coordinator, health_port=str(health_port))
    process = stack.enter_context(subprocess.Popen(command(), env=variables))
    stack.callback(process.kill)
    return address


def _models(folder: Path, kind: Kind) -> tuple[str, str]:
    """Folders of the target and the draft."""
    if kind == "pair":
        from specpool.engine.models.embedded_pair import embedded_pair

        pair = embedded_pair()
        return str(pair.target), str(pair.draft)
    from benchmarks.pair import make_tiny_pair  # imports torch

    target, draft = make_tiny_pair(folder, max_position_embeddings=TINY_MODEL_LEN)
    return str(target), str(draft)
