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
from threading import Thread
from typing import NoReturn

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.config.devices import pick_rank_devices
from specpool.engine.config.options import INT8, EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.embedded_pair import local_model
from specpool.engine.models.facts import ModelFacts
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.probes.native_gemm import gemms_agree
from specpool.engine.probes.operations import OperationProbe
from specpool.engine.run.leader import LOOPBACK
from specpool.engine.run.messages import (
    Begin,
    Command,
    Loaded,
    Order,
    Probed,
    Report,
    decode,
    decode_run,
    receive,
    send,
)
from specpool.engine.run.pass_selection import build_exact_pass
from specpool.engine.run.processes import STOPS, end_process, start_rank
from specpool.engine.run.rendezvous import join
from specpool.engine.run.reservation import footprint_of, kv_limit
from specpool.engine.run.runner import PassRunner
from specpool.engine.sharding.group import Exchange, Group
from specpool.engine.sharding.links import Link, LinkExchange
from specpool.engine.sharding.nccl import NcclExchange, open_store
from specpool.engine.sharding.shares import Share
from specpool.engine.startup.self_test import attention_suits, probing
from specpool.engine.startup.sharded import load_sharding, load_share

log = logging.getLogger(__name__)

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
    # Each rank ends when its standard input closes, even if this process is killed.
    ranks = [
        start_rank(rank, options.model_copy(update={"device": device}), subprocess.PIPE)
        for rank, device in enumerate(devices, options.node_rank * len(devices))
    ]
    try:
        while all(rank.poll() is None for rank in ranks):
            time.sleep(POLL_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    sys.exit(max(rank.returncode for rank in ranks))


def follow(link: Link, rank: int, options: EngineOptions) -> None:
    """Serve rank 0 until it stops. `options`: with the device of this rank.

    UnsupportedModelError: the shard cannot be loaded or run. EOFError: rank 0 has hung up.
    """
    link.watch(lambda name: _end(f"{name} has ended", options))
    if options.activations == INT8:  # only rank 0 refuses it, and reports why
        options = options.model_copy(update={"activations": "auto"})
    with torch.inference_mode():
        runner, facts = _build(link, rank, receive(link, Order), options)
        while _obey(link, runner, facts):
            pass


def _build(link: Link, rank: int, order: Order, options: EngineOptions) -> tuple[PassRunner, ModelFacts]:
    """Load this rank's shard and build its pass, in step with rank 0."""
    sharding = load_sharding(options, order.sums)
    loaded, model_facts = load_share(options, Share(sharding, rank), order.exact)
    facts = model_facts.of_rank(sharding.kv_heads.sizes[rank])
    send(link, Loaded(sums={name: checksum.hex() for name, checksum in loaded.checksums.items()}))
    group = Group(rank, sharding, facts.device, _exchange(link, rank, order, options, facts.device))
    forward_pass, tiles = build_exact_pass(loaded, facts, options, order.exact, group)
    footprint = footprint_of(loaded, facts, forward_pass, options.resolve_max_num_batched_tokens(facts.device.type))
    send(
        link,
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
    begin = receive(link, Begin)
    arena = KVArena(
        facts.layers,
        facts.kv_heads,
        begin.columns,
        facts.head_dim,
        forward_pass.compute_dtype,
        facts.device,
        begin.tables,
        begin.page_size,
    )
    return PassRunner(forward_pass, arena, begin.tiles, facts.query_groups, facts.hidden_size), facts


def _exchange(link: Link, rank: int, order: Order, options: EngineOptions, device: torch.device) -> Exchange:
    if (order.store_port is None) != (device.type == "cpu"):
        raise UnsupportedModelError("device: ranks must be all on GPUs or all on the CPU, on every node")
    if order.store_port is None:
        return LinkExchange(rank, [link])
    store = open_store(options.master_addr or LOOPBACK, order.store_port)
    return NcclExchange(rank, options.tensor_parallel, store, device)


def _obey(link: Link, runner: PassRunner, facts: ModelFacts) -> bool:
    """Run commands until the end of a probe, or until rank 0 stops; False if it stops."""
    with ExitStack() as context:
        probe: OperationProbe | None = None
        while True:
            command, arguments = decode(link.receive())
            if command is Command.RUN:
                runner.run(*decode_run(arguments))
            elif command is Command.ASSIGN:
                slot, first, *pages = arguments
                runner.arena.assign(slot, first, pages)
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
    if not attention_suits(runner.forward_pass, runner.arena, facts):
        unequal.append("attention")
    send(link, Probed(unequal=unequal))
    return True


def _end(reason: str, options: EngineOptions) -> NoReturn:
    """End this process. The node of rank 0 need not log the reason, because rank 0 has logged it."""
    if options.node_rank:
        end_process(reason)
    os._exit(1)


def _watch_parent() -> None:
    """End this process with the process that started it, which holds the other end of standard input."""
    sys.stdin.read()
    end_process("its node has ended")


def _link_to_rank_0(rank: int, options: EngineOptions) -> Link:
    if options.node_rank:
        Thread(target=_watch_parent, daemon=True).start()
        return join(options, rank)
    link = Link("rank 0", socket.socket(fileno=os.dup(0)))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # processes that this one starts do not keep the link open
    return link


def main() -> None:
    """Run a rank. Arguments: its number, and options as JSON with its device."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s rank %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    rank, options = int(sys.argv[1]), EngineOptions.model_validate_json(sys.argv[2])
    try:
        follow(_link_to_rank_0(rank, options), rank, options)
        os._exit(0)
    except (EOFError, ConnectionError):
        _end("rank 0 has refused this rank, or has ended", options)
    except (UnsupportedModelError, OSError) as error:
        log.error("a rank cannot run: %s", error)
    except Exception:
        log.exception("a rank has failed")
    os._exit(1)  # the other ranks wait for this one, and threads of libraries may never end


if __name__ == "__main__":
    main()
