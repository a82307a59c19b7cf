"""A rank other than 0: it loads its share, then runs whatever rank 0 tells it.

It is started by rank 0 or, on another node, by `specpool.engine.startup.node`.
It ends when rank 0 ends.
"""

import logging
import os
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.facts import ModelFacts
from specpool.engine.probes.native_gemm import products_agree
from specpool.engine.probes.operations import OperationProbe
from specpool.engine.run.commands import End, Move, Run, decoded
from specpool.engine.run.connections import end_process, ignore_stops, receive, send, watch
from specpool.engine.run.messages import Begin, Loaded, Order, Probed, Report
from specpool.engine.run.pass_selection import build_exact_pass
from specpool.engine.run.rendezvous import join
from specpool.engine.run.reservation import footprint_of, kv_limit
from specpool.engine.run.runner import PassRunner
from specpool.engine.sharding.group import Group, open_store
from specpool.engine.sharding.shares import Share
from specpool.engine.startup.self_test import attention_suits, probing
from specpool.engine.startup.sharded import load_share
from specpool.engine.startup.sharding import load_sharding

log = logging.getLogger(__name__)


def follow(connection: Connection, device: str | None = None) -> None:
    """Serves rank 0 until it says that it stops. `device`: of a rank on another node: rank 0 does not know it.

    UnsupportedModelError: the share cannot be loaded or run. EOFError: rank 0 has hung up.
    """
    order = receive(connection, Order)
    watch({"rank 0": connection}, lambda name: _end(f"{name} has ended", device))
    options = order.options if device is None else order.options.model_copy(update={"device": device})
    with torch.inference_mode():
        runner, facts = _built(connection, order, options)
        while _obey(connection, runner, facts):
            pass


def _built(connection: Connection, order: Order, options: EngineOptions) -> tuple[PassRunner, ModelFacts]:
    """Loads this rank's share of the model and builds its pass, in step with rank 0. Returns the share's facts, too."""
    share = Share(load_sharding(options, order.sums), order.rank)
    loaded, whole = load_share(options, share, order.exact)
    facts = whole.of_rank(share.sharding.kv_heads.sizes[share.rank])
    send(connection, Loaded(sums={name: its.hex() for name, its in loaded.checksums.items()}))
    group = Group(order.rank, share.sharding, open_store(order.store, share.sharding.ranks), facts.device)
    forward_pass, tiles = build_exact_pass(loaded, facts, options, order.exact, group)
    footprint = footprint_of(loaded, facts, forward_pass, options.resolve_max_num_batched_tokens(facts.device.type))
    compiled = forward_pass.compiled_products
    send(
        connection,
        Report(
            device=options.device,
            forward_pass=type(forward_pass).__name__,
            tiles=tiles,
            agrees=compiled is None or products_agree(compiled),
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
    return PassRunner(forward_pass, arena, begin.tiles, facts.query_groups), facts


def _obey(connection: Connection, runner: PassRunner, facts: ModelFacts) -> bool:
    """Runs the commands of rank 0, up to the end of a probe, or of all; returns whether more is to be done."""
    with ExitStack() as context:
        probe: OperationProbe | None = None
        while True:
            command = decoded(connection.recv_bytes())
            if isinstance(command, Run):
                runner.run(command.spans, command.locations)
            elif isinstance(command, Move):
                runner.arena.move(command.source, command.destination, command.count)
            elif isinstance(command, End):
                return False
            elif probe is not None:
                break
            else:
                probe = context.enter_context(probing(runner.forward_pass, runner.arena))
    unequal = list(probe.unequal)
    if not attention_suits(runner.forward_pass, runner.arena.keys[0], facts):
        unequal.append("attention")
    send(connection, Probed(unequal=unequal))
    return True


def _end(reason: str, device: str | None) -> NoReturn:
    """Ends this process, whose supervisor may start it again. On the node of rank 0, that one has told the reason."""
    if device is not None:
        end_process(reason)
    os._exit(1)  # whatever the other threads wait for


def main() -> None:
    """Runs a rank. Argument: the number of an inherited connection, or options as JSON, with this rank's device."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ignore_stops()
    if sys.argv[1].isdecimal():
        connection, device = Connection(int(sys.argv[1])), None
    else:
        watch({"its node": Connection(sys.stdin.fileno(), writable=False)}, lambda name: _end(f"{name} has ended", ""))
        options = EngineOptions.model_validate_json(sys.argv[1])
        connection, device = join(options), options.device
    try:
        follow(connection, device)
        os._exit(0)
    except (EOFError, ConnectionError):
        _end("rank 0 has turned this rank away, or has ended", device)
    except (UnsupportedModelError, OSError) as error:
        log.error("a rank cannot run: %s", error)
    except Exception:
        log.exception("a rank has failed")
    os._exit(1)  # at once: the other ranks wait for this one, and threads of libraries may never end


if __name__ == "__main__":
    main()
