"""Rank 0 of a divided model: it starts the ranks of its node, waits for those of others, and tells all what to run."""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.memory import Footprint
from specpool.engine.cache.spans import Location, Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.run.commands import End, Move, Probe, Run
from specpool.engine.run.connections import end_process, hang_up, receive, send, signals_held, watch
from specpool.engine.run.messages import Begin, Loaded, Order, Probed, Report
from specpool.engine.run.rendezvous import await_ranks
from specpool.engine.run.runner import PassRunner
from specpool.engine.sharding.group import Group, file_store, new_file, tcp_store
from specpool.engine.sharding.shares import Sharding
from specpool.protocol.worker_info import RankMemory

log = logging.getLogger(__name__)

LOOPBACK = "lo"
END_SECONDS = 5.0
"""Time that a rank gets to end when it is told to."""


class Leader:
    """The other ranks, as rank 0 sees them. When one of them ends, this process ends, too."""

    def __init__(self, options: EngineOptions, sharding: Sharding, devices: Sequence[str], exact: bool) -> None:
        """Starts or awaits all other ranks, which begin to load. `devices`: of the ranks of this node, its own first.

        UnsupportedModelError, before any rank is started.
        """
        self.sharding = sharding
        self.reports: list[Report] = []
        """Reports of all other ranks, once they have been received."""
        self._closing = False
        self._group: Group | None = None
        self._file: int | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        others: list[Connection] = []
        if options.nnodes > 1:
            try:
                others = await_ranks(options, sharding.ranks - len(devices))
            except OSError as error:
                address = f"{options.master_addr}:{options.master_port}"
                raise UnsupportedModelError(f"cannot listen for other nodes at {address}: {error}") from error
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
            self._file = new_file()
        host, ranks = str(options.master_addr), sharding.ranks
        self._store, store = tcp_store(host) if self._file is None else file_store(self._file, ranks)
        self._connections = [*(self._start() for _ in devices[1:]), *others]
        watch({f"rank {rank}": link for rank, link in enumerate(self._connections, 1)}, self._on_hangup)
        for rank, link in enumerate(self._connections, 1):
            # Ranks of other nodes know their devices themselves.
            its = options.model_copy(update={"device": devices[rank] if rank < len(devices) else ""})
            send(link, Order(rank=rank, sums=sharding.sums, options=its, exact=exact, store=store))

    def group(self, device: torch.device) -> Group:
        """Waits until all ranks have joined."""
        self._group = Group(0, self.sharding, self._store, device)
        return self._group

    def receive_sums(self) -> dict[str, bytes]:
        """Waits until all other ranks have loaded their shares. Returns the sums of weights that they made, by name."""
        loaded = [receive(link, Loaded) for link in self._connections]
        return {name: bytes.fromhex(its) for report in loaded for name, its in report.sums.items()}

    def receive_reports(self) -> None:
        """Waits until all other ranks have built their passes."""
        self.reports = [receive(link, Report) for link in self._connections]

    def begin(self, arena: KVArena, tiles: Tiles) -> None:
        """Lets all other ranks serve, with caches of as many columns as this one."""
        for link in self._connections:
            send(link, Begin(columns=arena.columns, tiles=tiles))
        arena.before_move = lambda *columns: self._tell(Move(*columns))

    def memory(self, device: str, footprint: Footprint) -> tuple[RankMemory, ...]:
        """The memory of all ranks. `device`, `footprint`: those of rank 0."""
        heads = self.sharding.kv_heads.sizes
        others = (
            RankMemory(its.device, its.weight_bytes, footprint.kv * its_heads // heads[0], its.activation_bytes)
            for its, its_heads in zip(self.reports, heads[1:], strict=True)
        )
        return RankMemory(device, footprint.weights, footprint.kv, footprint.activations), *others

    def run(self, runner: PassRunner, spans: Sequence[Span], locations: Sequence[Location]) -> torch.Tensor:
        """`PassRunner.run` on all ranks. Should it fail here, the process ends: the others are in the middle of it."""
        self._tell(Run(spans, locations))
        try:
            return runner.run(spans, locations)
        except Exception:
            log.exception("rank 0 failed in a pass")
            end_process("rank 0 has failed")

    @contextmanager
    def probing(self) -> Iterator[dict[str, None]]:
        """A context in which all other ranks probe the operations of passes. At its end the dictionary has the names of
        those that gave equal rows different bits."""
        found: dict[str, None] = {}
        self._tell(Probe())
        yield found
        self._tell(Probe(ends=True))
        for link in self._connections:
            found.update(dict.fromkeys(receive(link, Probed).unequal))

    def end(self) -> None:
        """Ends all other ranks, which have nothing to do, by a stop in order; nothing happens if they were ended."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._tell(End())
            for link in self._connections:
                link.poll(END_SECONDS)  # until it hangs up
        self.abandon()

    def abandon(self) -> None:
        """Ends all other ranks, whatever they do."""
        self._closing = True
        for link in self._connections:
            hang_up(link)
        for process in self._processes:
            process.kill()
            process.wait()
        if self._group is not None:
            self._group.leave()

    def close(self) -> None:
        """`end`, and frees what this process had for them."""
        self.end()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _tell(self, command: Run | Move | Probe | End) -> None:
        message = command.encoded()
        for link in self._connections:
            link.send_bytes(message)

    def _start(self) -> Connection:
        """A rank of this node: a process whose connection is inherited, so that nothing listens for it."""
        own, its = Pipe()
        command = [sys.executable, "-P", "-m", "specpool.engine.startup.follower", str(its.fileno())]
        inherited = [its.fileno(), *([self._file] if self._file is not None else [])]
        with signals_held():
            self._processes.append(subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL))
        its.close()
        return own

    def _on_hangup(self, name: str) -> None:
        if not self._closing:
            end_process(f"{name} has ended")
