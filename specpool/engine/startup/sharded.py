"""Starts the engine of a divided model: rank 0 here, and all other ranks as processes of their own."""

import atexit

import torch

from specpool.engine.config.devices import pick_rank_devices
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.facts import ModelFacts, read_facts
from specpool.engine.models.loading import LoadedModel, load_model
from specpool.engine.models.weights_fingerprint import weights_fingerprint
from specpool.engine.numerics.tiles import Tiles, common_tiles
from specpool.engine.passes.gpu.cublas import restrict_cublas
from specpool.engine.run.engine import Engine
from specpool.engine.run.leader import Leader
from specpool.engine.run.pass_selection import build_exact_pass
from specpool.engine.sharding.shares import Share, Sums
from specpool.engine.startup.numerics_fingerprint import numerics_fingerprint
from specpool.engine.startup.self_test import self_test
from specpool.engine.startup.sharding import load_sharding


def start_divided_engine(options: EngineOptions, exact: bool) -> Engine:
    """An engine that tells the other ranks what to run; its passes are not measured yet. UnsupportedModelError.

    Its logits are not compared with those of the library's model, since no rank has all weights.
    """
    devices = pick_rank_devices(options)
    sharding = load_sharding(options, _sums(options, devices[0]))
    leader = Leader(options, sharding, devices, exact)
    try:
        engine = _started(options, devices[0], exact, leader)
    except BaseException:
        leader.abandon()  # first, or their end would hide what has happened
        raise
    # Nobody closes the engine of a worker, and NCCL would let the interpreter wait for recorded passes without end.
    atexit.register(leader.end)
    return engine


def _started(options: EngineOptions, device: str, exact: bool, leader: Leader) -> Engine:
    """The engine, once all ranks have loaded their shares."""
    sharding = leader.sharding
    own = options.model_copy(update={"device": device})
    loaded, facts = load_share(own, Share(sharding, 0), exact)
    fingerprint = weights_fingerprint(loaded, {**loaded.checksums, **leader.receive_sums()})
    group = leader.group(facts.device)
    forward_pass, tiles = build_exact_pass(loaded, facts.of_rank(sharding.kv_heads.sizes[0]), own, exact, group)
    leader.receive_reports()
    for report in leader.reports:
        if report.forward_pass != type(forward_pass).__name__:
            raise UnsupportedModelError(
                f"ranks must have the same pass, but have {type(forward_pass).__name__} and {report.forward_pass}"
            )
    tiles = common_tiles([tiles, *(report.tiles for report in leader.reports)])
    engine = Engine(loaded, facts, forward_pass, tiles or Tiles(), own, leader)
    engine.bitwise = exact and tiles is not None and self_test(engine)
    engine.weights_fingerprint, engine.numerics_fingerprint = fingerprint, numerics_fingerprint(engine)
    return engine


def load_share(options: EngineOptions, share: Share, exact: bool) -> tuple[LoadedModel, ModelFacts]:
    """A rank's share of a model, and the facts of the whole model. Its threads are by default this rank's part of those
    that torch would use. UnsupportedModelError."""
    ranks = options.tensor_parallel // options.nnodes
    torch.set_num_threads(options.threads or max(1, torch.get_num_threads() // ranks))
    if exact and options.device != "cpu":
        restrict_cublas()
    loaded = load_model(options, share)
    return loaded, read_facts(loaded)


def _sums(options: EngineOptions, device: str) -> Sums:
    if options.tensor_parallel_sums != "auto":
        return options.tensor_parallel_sums
    return "whole" if device == "cpu" else "parts"
