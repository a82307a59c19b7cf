"""Starts the engine of a divided model: rank 0 here, and all other ranks as processes of their own."""

import os

import torch

from engine.engine import Engine
from engine.forward import build_exact_pass
from engine.models.facts import read_facts
from engine.models.fingerprints import weights_fingerprint
from engine.models.loading import UnsupportedModelError, load_model
from engine.numerics import Tiles, coarsest
from engine.options import EngineOptions
from engine.parallel.devices import devices_of
from engine.parallel.dividing import load_sharding
from engine.parallel.leader import Leader
from engine.parallel.shares import Share, Sums
from engine.passes.gpu.cublas import restrict_cublas
from engine.probes.numerics import numerics_fingerprint
from engine.probes.self_test import self_test


def start_divided_engine(options: EngineOptions, exact: bool) -> Engine:
    """An engine that tells the other ranks what to run; its passes are not measured yet. UnsupportedModelError.

    Its logits are not compared with those of the library's model, since no rank has all weights.
    """
    devices = devices_of(options)
    sharding = load_sharding(options, _sums(options, devices[0]))
    leader = Leader(options, sharding, devices, exact)
    own = options.model_copy(update={"device": devices[0]})
    use_threads(options)
    if exact and devices[0] != "cpu":
        restrict_cublas()
    loaded = load_model(own, Share(sharding, 0))
    facts, fingerprint = read_facts(loaded), weights_fingerprint(loaded, {**loaded.sums, **leader.receive_sums()})
    group = leader.group(facts.device)
    forward_pass, tiles = build_exact_pass(loaded, facts.of_rank(sharding.kv_heads.sizes[0]), own, exact, group)
    leader.receive_reports()
    for report in leader.reports:
        if report.forward_pass != type(forward_pass).__name__:
            raise UnsupportedModelError(
                f"ranks must have the same pass, but have {type(forward_pass).__name__} and {report.forward_pass}"
            )
    tiles = coarsest([tiles, *(report.tiles for report in leader.reports)])
    engine = Engine(loaded, facts, forward_pass, tiles or Tiles(), own, leader)
    engine.bitwise = exact and tiles is not None and self_test(engine)
    engine.weights_fingerprint, engine.numerics_fingerprint = fingerprint, numerics_fingerprint(engine)
    return engine


def use_threads(options: EngineOptions) -> None:
    """Sets the threads of this rank: by default, the ranks of a node divide the processors that it may use."""
    ranks = options.tensor_parallel // options.nnodes
    torch.set_num_threads(options.threads or max(1, len(os.sched_getaffinity(0)) // ranks))


def _sums(options: EngineOptions, device: str) -> Sums:
    if options.tensor_parallel_sums != "auto":
        return options.tensor_parallel_sums
    return "whole" if device == "cpu" else "parts"
