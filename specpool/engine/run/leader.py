"""Rank 0 of a sharded model: starts the ranks of its node, awaits the ranks of other nodes, and commands them all."""

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
"""Time for a rank to exit after END."""


class Leader:
    """Rank 0's connections to the other ranks. When a rank ends, this process ends too."""

    def __init__(self, options: EngineOptions, sharding: Sharding, devices: Sequence[str], exact: bool) -> None:
        """Start or await all other ranks, which begin to load. `devices`: of this node's ranks, rank 0 first.

        UnsupportedModelError is raised before any rank starts.
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
        """Wait until all ranks have joined."""
        self._group = Group(0, self.sharding, self._store, device)
        return self._group

    def receive_sums(self) -> dict[str, bytes]:
        """Wait until all other ranks have loaded their shards. Return their checksums of weights by name."""
        loaded = [receive(link, Loaded) for link in self._connections]
        return {name: bytes.fromhex(checksum) for report in loaded for name, checksum in report.sums.items()}

    def receive_reports(self) -> None:
        """Wait until all other ranks have built their passes."""
        self.reports = [receive(link, Report) for link in self._connections]

    def begin(self, arena: KVArena, tiles: Tiles) -> None:
        """Let all other ranks serve, with as many cache columns as this one."""
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
        """Run `PassRunner.run` on all ranks. A failure ends the process: the other ranks are in mid-pass."""
        self._tell(encode_run(spans, locations))
        try:
            return runner.run(spans, locations)
        except Exception:
            log.exception("forward pass failed on rank 0")
            end_process("rank 0 has failed")

    @contextmanager
    def probing(self) -> Iterator[dict[str, None]]:
        """Let all other ranks probe the operations of passes. At the end of the context, the dictionary names the
        operations that gave equal rows different bits."""
        unequal: dict[str, None] = {}
        self._tell(encode(Command.PROBE))
        yield unequal
        self._tell(encode(Command.END_PROBE))
        for link in self._connections:
            unequal.update(dict.fromkeys(receive(link, Probed).unequal))

    def end(self) -> None:
        """Stop all other ranks, which must be idle. Do nothing the second time."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._tell(encode(Command.END))
            for link in self._connections:
                link.poll(END_SECONDS)  # until the rank hangs up
        self.abandon()

    def abandon(self) -> None:
        """End all other ranks at once."""
        self._closing = True
        for link in self._connections:
            hang_up(link)
        for process in self._processes:
            process.kill()
            process.wait()
        if self._group is not None:
            self._group.leave()

    def close(self) -> None:
        """Call `end`, then close the store's file."""
        self.end()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _tell(self, message: bytes) -> None:
        for link in self._connections:
            link.send_bytes(message)

    def _start(self) -> Connection:
        """Start a rank of this node. It inherits its connection, so no port is opened."""
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
