"""Lets faults happen, and keeps account of those that may end a request with an error."""

from typing import TYPE_CHECKING

from simulator.network import Network
from simulator.setup import FORGET_DRAFT, Fault
from specpool.protocol.errors import NotFoundError

if TYPE_CHECKING:
    from simulator.simulation import Simulation
    from simulator.workers import Worker


class Faults:
    """The faults of a simulation."""

    def __init__(self, simulation: "Simulation", network: Network) -> None:
        self._simulation, self._network = simulation, network
        self._harmful: list[float] = []
        """When target workers failed in a way that counts against requests."""

    def happen(self, fault: Fault) -> bool:
        """Let a fault happen. Return whether it had anything to affect."""
        if fault.kind == "abort":
            return self._abort(fault.name)
        worker = self._simulation.workers[fault.worker]
        endpoint, life = self._network[worker.setup.address], worker.life
        loop = self._network.loop
        if worker.is_target and fault.kind in ("crash", "hang", "silence", "spoil", "delay", "forget"):
            self._harmful += [loop.time()] * max(1, fault.number if fault.kind == "spoil" else 1)
        if fault.kind == "cut":
            return self._network.cut(worker.setup.address, lag=fault.seconds / 10)
        if fault.kind == "refuse":
            endpoint.refuses_until = max(endpoint.refuses_until, loop.time() + fault.seconds)
            return self._network.cut(worker.setup.address)
        if fault.kind == "silence":
            self._network.silence(worker.setup.address, fault.seconds)
        elif fault.kind == "delay":
            endpoint.delay, endpoint.delayed = fault.seconds, fault.number
        elif fault.kind == "crash":
            worker.crash(fault.seconds, fault.number or None)
            return life is not None
        elif fault.kind == "spoil":
            worker.tampering.spoil(fault.name, fault.number)
            return False  # counted once it spoils an answer
        elif fault.kind == "forget":
            return worker.forget()
        elif fault.kind == FORGET_DRAFT:
            return worker.forget_draft()
        elif life is None:
            return False
        elif fault.kind == "hang":
            life.thread.hang = fault.seconds
        elif fault.kind == "slow":
            life.thread.slowness = 1.0 + fault.number
            loop.call_later(fault.seconds, self._quicken, worker)
        else:
            raise ValueError(fault.kind)
        return True

    def heal(self) -> None:
        """End all faults that last."""
        self._network.heal()
        for worker in self._simulation.workers:
            worker.tampering.clear()
            self._quicken(worker)
            if worker.life is not None:
                worker.life.thread.hang = 0.0

    def number_since(self, began: float) -> int:
        """Number of failures of target workers that count against a request."""
        return sum(at >= began for at in self._harmful)

    @staticmethod
    def _quicken(worker: "Worker") -> None:
        if worker.life is not None:
            worker.life.thread.slowness = 1.0

    def _abort(self, name: str) -> bool:
        client = self._simulation.clients.get(name)
        if client is None or client.outcome.end:
            return False
        try:
            self._simulation.coordinator.abort(client.outcome.request.client, name)
        except NotFoundError:
            return False
        client.outcome.is_aborted = True
        return True
