"""Rank 0 of a sharded model: starts the ranks of its node, awaits the ranks of other nodes, and commands them all."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.memory import Footprint
from specpool.engine.cache.spans import Location, Span
from specpool.engine.config.options import INT8, EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.run.connections import Link, Message, end_process, hang_up, receive, send, signals_held, watch
from specpool.engine.run.messages import Begin, Command, Loaded, Order, Probed, Report, encode, encode_run
from specpool.engine.run.rendezvous import await_ranks
from specpool.engine.run.runner import PassResult, PassRunner
from specpool.engine.sharding.group import Exchange, Group
from specpool.engine.sharding.nccl import NcclExchange, file_store, new_file, tcp_store
from specpool.engine.sharding.shares import Sharding
from specpool.engine.sharding.sockets import SocketExchange
from specpool.protocol.worker_info import RankMemory

log = logging.getLogger(__name__)

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
        others: list[Link] = []
        if options.nnodes > 1:
            try:
                others = await_ranks(options, sharding.ranks - len(devices))
            except OSError as error:
                address = f"{options.master_addr}:{options.master_port}"
                raise UnsupportedModelError(f"cannot listen for other nodes at {address}: {error}") from error
        store = None if devices[0] == "cpu" else self._open_store(options)
        links = [*(self._start() for _ in devices[1:]), *others]
        self._connections, self._data = [link.commands for link in links], [link.data for link in links]
        watch({f"rank {rank}": link for rank, link in enumerate(self._connections, 1)}, self._on_hangup)
        for rank, link in enumerate(self._connections, 1):
            # Ranks of other nodes choose their own devices. Only rank 0 refuses int8 activations, and reports why.
            device = devices[rank] if rank < len(devices) else ""
            activations = "auto" if options.activations == INT8 else options.activations
            rank_options = options.model_copy(update={"device": device, "activations": activations})
            send(link, Order(rank=rank, sums=sharding.sums, options=rank_options, exact=exact, store=store))

    def group(self, device: torch.device) -> Group:
        """Wait until all ranks have joined."""
        exchange: Exchange = SocketExchange(0, self._data)
        if device.type != "cpu":
            exchange = NcclExchange(0, self.sharding.ranks, self._store, device)
        self._group = Group(0, self.sharding, device, exchange)
        return self._group

    def receive_sums(self) -> dict[str, bytes]:
        """Wait until all other ranks have loaded their shards. Return their checksums of weights by name."""
        loaded = self._receive(Loaded)
        return {name: bytes.fromhex(checksum) for report in loaded for name, checksum in report.sums.items()}

    def receive_reports(self) -> None:
        """Wait until all other ranks have built their passes."""
        self.reports = self._receive(Report)

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

    def run(
        self, runner: PassRunner, spans: Sequence[Span], locations: Sequence[Location], state_layers: tuple[int, ...]
    ) -> PassResult:
        """Run `PassRunner.run` on all ranks. A failure ends the process: the other ranks are in mid-pass."""
        self._tell(encode_run(spans, locations, state_layers))
        try:
            return runner.run(spans, locations, state_layers)
        except EOFError as error:
            end_process(str(error))
        except Exception:
            log.exception("forward pass failed on rank 0")
            end_process("rank 0 has failed")

    def tell_to_capture(self, *sizes: int) -> None:
        """Let all other ranks run `PassRunner.capture_graphs`. This rank must run it too."""
        self._tell(encode(Command.CAPTURE, *sizes))

    @contextmanager
    def probing(self) -> Iterator[dict[str, None]]:
        """Let all other ranks probe the operations of passes. At the end of the context, the dictionary names the
        operations that gave equal rows different bits."""
        unequal: dict[str, None] = {}
        self._tell(encode(Command.PROBE))
        yield unequal
        self._tell(encode(Command.END_PROBE))
        for probed in self._receive(Probed):
            unequal.update(dict.fromkeys(probed.unequal))

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
        for data in self._data:
            data.close()

    def close(self) -> None:
        """Call `end`, then close the store's file."""
        self.end()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _tell(self, message: bytes) -> None:
        for rank, link in enumerate(self._connections, 1):
            try:
                link.send_bytes(message)
            except OSError:
                if self._closing:
                    raise
                end_process(f"rank {rank} has ended")

    def _receive(self, kind: type[Message]) -> list[Message]:
        """Wait for a message of every other rank. EOFError: a rank has ended."""
        messages = []
        for rank, link in enumerate(self._connections, 1):
            try:
                messages.append(receive(link, kind))
            except (EOFError, OSError) as error:
                raise EOFError(f"rank {rank} has ended") from error
        return messages

    def _open_store(self, options: EngineOptions) -> str:
        """Open the store of GPU ranks, and return its address."""
        if options.nnodes > 1:
            try:
                self._store, address = tcp_store(str(options.master_addr))
            except OSError as error:
                raise UnsupportedModelError(str(error)) from error
        else:
            self._file = new_file()
            self._store, address = file_store(self._file, self.sharding.ranks)
        return address

    def _start(self) -> Link:
        """Start a rank of this node. It inherits its connections, so no port is opened."""
        own, other = Pipe()
        data, others_data = socket.socketpair()
        ends = [other.fileno(), others_data.fileno()]
        command = [sys.executable, "-P", "-m", "specpool.engine.startup.follower", *map(str, ends)]
        inherited = [*ends, *([self._file] if self._file is not None else [])]
        with signals_held():
            self._processes.append(subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL))
        other.close()
        others_data.close()
        return Link(own, data)

    def _on_hangup(self, name: str) -> None:
        if not self._closing:
            end_process(f"{name} has ended")
