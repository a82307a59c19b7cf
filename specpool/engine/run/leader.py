"""Rank 0 of a sharded model: it starts the ranks of its node, awaits those of other nodes, and commands them all."""

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
from specpool.engine.run.connections import end_process, hang_up, receive, send, signals_held, watch
from specpool.engine.run.messages import Begin, Command, Loaded, Order, Probed, Report, encode, encode_run
from specpool.engine.run.rendezvous import await_ranks
from specpool.engine.run.runner import PassRunner
from specpool.engine.sharding.group import Group, file_store, new_file, tcp_store
from specpool.engine.sharding.shares import Sharding
from specpool.protocol.worker_info import RankMemory

log = logging.getLogger(__name__)

LOOPBACK = "lo"
END_SECONDS = 5.0
"""Time that a rank has to end after an order to end."""


class Leader:
    """Rank 0's connections to the other ranks. When a rank ends, this process ends too."""

    def __init__(self, options: EngineOptions, sharding: Sharding, devices: Sequence[str], exact: bool) -> None:
        """Starts or awaits all other ranks, which begin to load. `devices`: of this node's ranks, rank 0 first.

        Raises UnsupportedModelError before it starts any rank.
        """
        self.sharding = sharding
        self.reports: list[Report] = []
        """Reports of all other ranks; empty until `receive_reports`."""
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
            # Ranks of other nodes choose their own devices.
            rank_options = options.model_copy(update={"device": devices[rank] if rank < len(devices) else ""})
            send(link, Order(rank=rank, sums=sharding.sums, options=rank_options, exact=exact, store=store))

    def group(self, device: torch.device) -> Group:
        """Waits until all ranks have joined."""
        self._group = Group(0, self.sharding, self._store, device)
        return self._group

    def receive_sums(self) -> dict[str, bytes]:
        """Waits until all other ranks have loaded their shards. Returns their checksums of weights by name."""
        loaded = [receive(link, Loaded) for link in self._connections]
        return {name: bytes.fromhex(checksum) for report in loaded for name, checksum in report.sums.items()}

    def receive_reports(self) -> None:
        """Waits until all other ranks have built their passes."""
        self.reports = [receive(link, Report) for link in self._connections]

    def begin(self, arena: KVArena, tiles: Tiles) -> None:
        """Lets all other ranks serve, with as many cache columns as this one."""
        for link in self._connections:
            send(link, Begin(columns=arena.columns, tiles=tiles))
        arena.before_move = lambda *columns: self._tell(encode(Command.MOVE, *columns))

    def memory(self, device: str, footprint: Footprint) -> tuple[RankMemory, ...]:
        """The memory of all ranks. `device` and `footprint` describe rank 0."""
        first_heads, *heads = self.sharding.kv_heads.sizes
        others = (
            RankMemory(report.device, report.weight_bytes, footprint.kv * count // first_heads, report.activation_bytes)
            for report, count in zip(self.reports, heads, strict=True)
        )
        return RankMemory(device, footprint.weights, footprint.kv, footprint.activations), *others

    def run(self, runner: PassRunner, spans: Sequence[Span], locations: Sequence[Location]) -> torch.Tensor:
        """Runs `PassRunner.run` on all ranks. A failure ends the process, since the other ranks are amid the pass."""
        self._tell(encode_run(spans, locations))
        try:
            return runner.run(spans, locations)
        except Exception:
            log.exception("rank 0 failed in a pass")
            end_process("rank 0 has failed")

    @contextmanager
    def probing(self) -> Iterator[dict[str, None]]:
        """Lets all other ranks probe the operations of passes. At the end of the context, the dictionary names the
        operations that gave equal rows different bits."""
        unequal: dict[str, None] = {}
        self._tell(encode(Command.PROBE))
        yield unequal
        self._tell(encode(Command.END_PROBE))
        for link in self._connections:
            unequal.update(dict.fromkeys(receive(link, Probed).unequal))

    def end(self) -> None:
        """Stops all other ranks, which must be idle. Does nothing the second time."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._tell(encode(Command.END))
            for link in self._connections:
                link.poll(END_SECONDS)  # until it hangs up
        self.abandon()

    def abandon(self) -> None:
        """Ends all other ranks at once."""
        self._closing = True
        for link in self._connections:
            hang_up(link)
        for process in self._processes:
            process.kill()
            process.wait()
        if self._group is not None:
            self._group.leave()

    def close(self) -> None:
        """Calls `end`, and closes the file of the store."""
        self.end()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _tell(self, message: bytes) -> None:
        for link in self._connections:
            link.send_bytes(message)

    def _start(self) -> Connection:
        """Starts a rank of this node. It inherits its connection, so no port is opened."""
        own, other = Pipe()
        command = [sys.executable, "-P", "-m", "specpool.engine.startup.follower", str(other.fileno())]
        inherited = [other.fileno(), *([self._file] if self._file is not None else [])]
        with signals_held():
            self._processes.append(subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL))
        other.close()
        return own

    def _on_hangup(self, name: str) -> None:
        if not self._closing:
            end_process(f"{name} has ended")
