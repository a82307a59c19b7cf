"""Rank 0 of a sharded model: starts the ranks of its node, awaits the ranks of other nodes, and commands them all."""

import contextlib
import logging
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.memory import Footprint
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.run.messages import (
    Begin,
    Command,
    Loaded,
    Message,
    Order,
    Probed,
    Report,
    encode,
    encode_run,
    receive,
    send,
)
from specpool.engine.run.processes import end_process, start_rank
from specpool.engine.run.rendezvous import await_ranks
from specpool.engine.run.runner import PassResult, PassRunner
from specpool.engine.sharding.group import Exchange, Group
from specpool.engine.sharding.links import Link, LinkExchange
from specpool.engine.sharding.nccl import NcclExchange, Store, serve_store
from specpool.engine.sharding.shares import Sharding
from specpool.protocol.worker_info import RankMemory

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
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
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store: Store | None = None
        others: list[Link] = []
        try:
            if options.nnodes > 1:
                ranks = range(len(devices), sharding.ranks)
                self._store, others = await_ranks(options, ranks, self._on_hangup)
            elif devices[0] != "cpu":
                self._store = serve_store(socket.create_server((LOOPBACK, 0)))
        except OSError as error:
            address = f"{options.master_addr or LOOPBACK}:{options.master_port}"
            raise UnsupportedModelError(f"cannot listen for other ranks at {address}: {error}") from error
        own = [self._start(rank, options, device) for rank, device in enumerate(devices[1:], 1)]
        self._links = [*own, *others]
        store_port = None if self._store is None or devices[0] == "cpu" else self._store.port
        for link in self._links:
            send(link, Order(sums=sharding.sums, exact=exact, store_port=store_port))

    def group(self, device: torch.device) -> Group:
        """Wait until all ranks have joined."""
        exchange: Exchange = LinkExchange(0, self._links)
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
        """Let all other ranks serve, with the pages of this one."""
        slots, pages = arena.tables.shape
        for link in self._links:
            send(link, Begin(columns=arena.columns, tables=(slots, pages), page_size=arena.page_size, tiles=tiles))
        arena.on_assign = lambda slot, first, pages: self._tell(encode(Command.ASSIGN, slot, first, *pages))

    def memory(self, device: str, footprint: Footprint) -> tuple[RankMemory, ...]:
        """The memory of all ranks. `device` and `footprint` describe rank 0."""
        first_heads, *heads = self.sharding.kv_heads.sizes
        others = (
            RankMemory(report.device, report.weight_bytes, footprint.kv * count // first_heads, report.activation_bytes)
            for report, count in zip(self.reports, heads, strict=True)
        )
        return RankMemory(device, footprint.weights, footprint.kv, footprint.activations), *others

    def run(self, runner: PassRunner, spans: Sequence[Span], state_layers: tuple[int, ...]) -> PassResult:
        """Run `PassRunner.run` on all ranks. A failure ends the process: the other ranks are in mid-pass."""
        self._tell(encode_run(spans, state_layers))
        try:
            return runner.run(spans, state_layers)
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
        with contextlib.suppress(EOFError):
            self._tell(encode(Command.END))
            for link in self._links:
                link.wait_readable(END_SECONDS)  # until the rank hangs up
        self.abandon()

    def abandon(self) -> None:
        """End all other ranks at once."""
        self._closing = True
        for link in self._links:
            link.hang_up()
        for process in self._processes:
            process.kill()
            process.wait()
        if self._group is not None:
            self._group.leave()

    def _tell(self, message: bytes) -> None:
        try:
            for link in self._links:
                link.send(message)
        except EOFError as error:
            if self._closing:
                raise
            end_process(str(error))

    def _receive(self, kind: type[Message]) -> list[Message]:
        """Wait for a message of every other rank. EOFError: a rank has ended."""
        return [receive(link, kind) for link in self._links]

    def _start(self, rank: int, options: EngineOptions, device: str) -> Link:
        """Start a rank of this node. Its standard input is the link, so no port is opened."""
        own, other = socket.socketpair()
        with other:
            self._processes.append(start_rank(rank, options.model_copy(update={"device": device}), other.fileno()))
        link = Link(f"rank {rank}", own)
        link.watch(self._on_hangup)
        return link

    def _on_hangup(self, name: str) -> None:
        if not self._closing:
            end_process(f"{name} has ended")
