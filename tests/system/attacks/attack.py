"""Registry of attacks. An attack is a coroutine that harms a service until it is cancelled."""

import asyncio
import importlib
import pkgutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import attacks
from attacks.service import Kind, Service, Setup

Run = Callable[[Service], Awaitable[None]]


@dataclass(frozen=True)
class Attack:
    """An attack, and the service and the well-behaved client that it needs."""

    name: str
    run: Run
    setup: Setup


ATTACKS: dict[str, Attack] = {}
"""All attacks by name."""


def attack(
    name: str,
    kind: Kind = "fakes",
    *,
    flags: tuple[str, ...] = (),
    worker_flags: tuple[str, ...] = (),
    victims: int = 1,
    edge: bool = False,
) -> Callable[[Run], Run]:
    """Register a coroutine as an attack on a service of this kind.

    `flags`, `worker_flags`: further flags of the coordinator, and of both workers or fakes. `victims`: requests that
    the well-behaved client has in flight. `edge`: whether clients reach the coordinator through the edge only.
    """

    def register(run: Run) -> Run:
        ATTACKS[name] = Attack(name, run, Setup(kind, flags, worker_flags, victims, edge))
        return run

    return register


def load_attacks() -> dict[str, Attack]:
    """Import every module of this folder, which registers its attacks."""
    for module in pkgutil.iter_modules(attacks.__path__):
        if module.name != "__main__":
            importlib.import_module(f"attacks.{module.name}")
    return ATTACKS


def harm(name: str, service: Service) -> None:
    """Run an attack in this process until it is killed."""

    async def run() -> None:
        await load_attacks()[name].run(service)

    asyncio.run(run())
