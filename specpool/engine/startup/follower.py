"""A rank other than 0: loads its shard, then runs the commands of rank 0 until rank 0 ends.

`python -m specpool.engine.startup.follower` runs one rank. Rank 0 starts the ranks of its own node; `run_node` starts
the ranks of another node.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.config.devices import pick_rank_devices
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.embedded_pair import local_model
from specpool.engine.models.facts import ModelFacts
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.probes.native_gemm import gemms_agree
from specpool.engine.probes.operations import OperationProbe
from specpool.engine.run.connections import STOPS, Link, end_process, ignore_stops, receive, send, signals_held, watch
from specpool.engine.run.messages import Begin, Command, Loaded, Order, Probed, Report, decode, decode_run
from specpool.engine.run.pass_selection import build_exact_pass
from specpool.engine.run.rendezvous import join
from specpool.engine.run.reservation import footprint_of, kv_limit
from specpool.engine.run.runner import PassRunner
from specpool.engine.sharding.group import Exchange, Group
from specpool.engine.sharding.nccl import NcclExchange, open_store
from specpool.engine.sharding.shares import Share
from specpool.engine.sharding.sockets import SocketExchange
from specpool.engine.startup.self_test import attention_suits, probing
from specpool.engine.startup.sharded import load_sharding, load_share

log = logging.getLogger(__name__)

COMMAND = [sys.executable, "-P", "-m", "specpool.engine.startup.follower"]
POLL_SECONDS = 0.1


def run_node(program: str, options: EngineOptions) -> NoReturn:
    """Run the ranks of a node other than 0, until SIGTERM, SIGINT or the end of any rank."""
    for number in STOPS:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        options = options.model_copy(update={"model": local_model(options.model, log.info)})
        devices = pick_rank_devices(options)
    except UnsupportedModelError as error:
        sys.exit(f"{program}: {error}")
    arguments = [options.model_copy(update={"device": device}).model_dump_json() for device in devices]
    # Each rank ends when its standard input closes, even if this process is killed.
    with signals_held():
        ranks = [subprocess.Popen([*COMMAND, argument], stdin=subprocess.PIPE) for argument in arguments]
    try:
        while all(rank.poll() is None for rank in ranks):
            time.sleep(POLL_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    sys.exit(max(rank.returncode for rank in ranks))


def follow(link: Link, own: EngineOptions | None = None) -> None:
    """Serve rank 0 until it stops. `own`: options of a rank on another node, in which nodes may differ.

    UnsupportedModelError: the shard cannot be loaded or run. EOFError: rank 0 has hung up.
    """
    connection = link.commands
    order = receive(connection, Order)
    watch({"rank 0": connection}, lambda name: _end(f"{name} has ended", own is not None))
    options = order.options
    if own is not None:
        options = options.model_copy(update={"device": own.device, "threads": own.threads})
    with torch.inference_mode():
        runner, facts = _build(link, order, options)
        while _obey(connection, runner, facts):
            pass


def _build(link: Link, order: Order, options: EngineOptions) -> tuple[PassRunner, ModelFacts]:
    """Load this rank's shard and build its pass, in step with rank 0."""
    connection, share = link.commands, Share(load_sharding(options, order.sums), order.rank)
    loaded, model_facts = load_share(options, share, order.exact)
    facts = model_facts.of_rank(share.sharding.kv_heads.sizes[share.rank])
    send(connection, Loaded(sums={name: checksum.hex() for name, checksum in loaded.checksums.items()}))
    group = Group(order.rank, share.sharding, facts.device, _exchange(link, order, share.sharding.ranks, facts.device))
    forward_pass, tiles = build_exact_pass(loaded, facts, options, order.exact, group)
    footprint = footprint_of(loaded, facts, forward_pass, options.resolve_max_num_batched_tokens(facts.device.type))
    send(
        connection,
        Report(
            device=options.device,
            forward_pass=type(forward_pass).__name__,
            activations=forward_pass.activations,
            tiles=tiles,
            agrees=not isinstance(forward_pass, NativeModel) or gemms_agree(forward_pass),
            kv_limit=kv_limit(options, footprint, facts.device).kv_bytes,
            weight_bytes=footprint.weights,
            weight_kinds=dict(forward_pass.weight_kinds),
            activation_bytes=footprint.activations,
        ),
    )
    begin = receive(connection, Begin)
    arena = KVArena(
        facts.layers, facts.kv_heads, begin.columns, facts.head_dim, forward_pass.compute_dtype, facts.device
    )
    return PassRunner(forward_pass, arena, begin.tiles, facts.query_groups, facts.hidden_size), facts


def _exchange(link: Link, order: Order, ranks: int, device: torch.device) -> Exchange:
    if (order.store is None) != (device.type == "cpu"):
        raise UnsupportedModelError("device: ranks must be all on GPUs or all on the CPU, on every node")
    if order.store is None:
        return SocketExchange(order.rank, [link.data])
    return NcclExchange(order.rank, ranks, open_store(order.store, ranks), device)


def _obey(connection: Connection, runner: PassRunner, facts: ModelFacts) -> bool:
    """Run commands until the end of a probe, or until rank 0 stops; False if it stops."""
    with ExitStack() as context:
        probe: OperationProbe | None = None
        while True:
            command, arguments = decode(connection.recv_bytes())
            if command is Command.RUN:
                runner.run(*decode_run(arguments))
            elif command is Command.MOVE:
                runner.arena.move(*arguments)
            elif command is Command.CAPTURE:
                runner.capture_graphs(*arguments)
            elif command is Command.PROBE:
                probe = context.enter_context(probing(runner.forward_pass, runner.arena))
            elif command is Command.END:
                return False
            else:
                break
    assert probe is not None
    unequal = list(probe.unequal)
    if not attention_suits(runner.forward_pass, runner.arena.keys[0], facts):
        unequal.append("attention")
    send(connection, Probed(unequal=unequal))
    return True


def _end(reason: str, is_logged: bool) -> NoReturn:
    """End this process. The node of rank 0 need not log the reason, because rank 0 has logged it."""
    if is_logged:
        end_process(reason)
    os._exit(1)


def main() -> None:
    """Run a rank. Arguments: the numbers of two inherited connections, or options as JSON with this rank's device."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s rank %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    ignore_stops()
    if sys.argv[1].isdecimal():
        commands, data = map(int, sys.argv[1:])
        link, own = Link(Connection(commands), socket.socket(fileno=data)), None
    else:
        watch(
            {"its node": Connection(sys.stdin.fileno(), writable=False)}, lambda name: _end(f"{name} has ended", True)
        )
        own = EngineOptions.model_validate_json(sys.argv[1])
        link = join(own)
    try:
        follow(link, own)
        os._exit(0)
    except (EOFError, ConnectionError):
        _end("rank 0 has refused this rank, or has ended", own is not None)
    except (UnsupportedModelError, OSError) as error:
        log.error("a rank cannot run: %s", error)
    except Exception:
        log.exception("a rank has failed")
    os._exit(1)  # the other ranks wait for this one, and threads of libraries may never end


if __name__ == "__main__":
    main()
