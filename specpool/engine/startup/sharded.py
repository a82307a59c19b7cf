"""Starts the engine of a sharded model: rank 0 in this process, the other ranks in processes of their own."""

import atexit
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from specpool.engine.config.devices import pick_rank_devices
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, gguf_file_of
from specpool.engine.models.config import load_config
from specpool.engine.models.draft_parts import OUTPUT_HEAD
from specpool.engine.models.facts import ModelFacts, read_facts, weights_fingerprint
from specpool.engine.models.loading import LoadedModel, load_model
from specpool.engine.models.stored_weights import stored_weights
from specpool.engine.numerics.tiles import Tiles, common_tiles
from specpool.engine.passes.families import why_not_shardable
from specpool.engine.passes.gpu.gemm import restrict_cublas
from specpool.engine.run.engine import Engine
from specpool.engine.run.leader import Leader
from specpool.engine.run.pass_selection import build_exact_pass
from specpool.engine.run.processes import end_process
from specpool.engine.run.reservation import LimitCache
from specpool.engine.sharding.shares import Sharding, Share, Sums, shard
from specpool.engine.startup.self_test import capture_graphs, numerics_fingerprint, self_test

COMPILING, TESTING = "compiling the forward pass", "testing batch invariance"
"""Phases of a start, sharded or not."""


def start_sharded_engine(
    options: EngineOptions, exact: bool, report: Callable[[str], None], limit_cache: LimitCache | None = None
) -> Engine:
    """Start all ranks, and report each phase. Step times are not measured yet. UnsupportedModelError.

    Logits are not compared with the library's model, since no rank has all weights.
    """
    devices = pick_rank_devices(options)
    sharding = load_sharding(options, _sums(options, devices[0]))
    if options.nnodes > 1:
        report("waiting for the other nodes")
    leader = Leader(options, sharding, devices, exact)
    try:
        engine = _start_rank_0(options, devices[0], exact, leader, report, limit_cache)
    except EOFError as error:
        end_process(str(error) or "a rank has ended")
    except BaseException:
        leader.abandon()  # before the other ranks end, which would hide the error
        raise
    # Workers never close their engine, and NCCL makes the interpreter wait forever for captured passes.
    atexit.register(leader.end)
    return engine


def _start_rank_0(
    options: EngineOptions,
    device: str,
    exact: bool,
    leader: Leader,
    report: Callable[[str], None],
    limit_cache: LimitCache | None,
) -> Engine:
    """The engine, once all ranks have loaded their shards."""
    sharding = leader.sharding
    own = options.model_copy(update={"device": device})
    loaded, facts = load_share(own, Share(sharding, 0), exact, report)
    report("waiting for the other ranks")
    fingerprint = weights_fingerprint(loaded, {**loaded.checksums, **leader.receive_sums()})
    group = leader.group(facts.device)
    report(COMPILING)
    forward_pass, tiles = build_exact_pass(loaded, facts.of_rank(sharding.kv_heads.sizes[0]), own, exact, group)
    leader.receive_reports()
    for other in leader.reports:
        _check_same("pass", type(forward_pass).__name__, other.forward_pass)
        _check_same("activations", forward_pass.activations, other.activations)
    tiles = common_tiles([tiles, *(other.tiles for other in leader.reports)])
    engine = Engine(loaded, facts, forward_pass, tiles or Tiles(), own, leader, limit_cache)
    capture_graphs(engine, report)
    if exact:
        report(TESTING)
    engine.bitwise = exact and tiles is not None and self_test(engine)
    engine.weights_fingerprint, engine.numerics_fingerprint = fingerprint, numerics_fingerprint(engine)
    return engine


def _check_same(what: str, own: str, others: str) -> None:
    if own != others:
        raise UnsupportedModelError(f"ranks must have the same {what}, but have {own} and {others}")


def load_share(
    options: EngineOptions, share: Share, exact: bool, report: Callable[[str], None] = lambda phase: None
) -> tuple[LoadedModel, ModelFacts]:
    """A rank's shard of a model, and the facts of the whole model. UnsupportedModelError.

    By default, the ranks of a node divide torch's number of threads.
    """
    ranks = options.tensor_parallel // options.nnodes
    torch.set_num_threads(options.threads or max(1, torch.get_num_threads() // ranks))
    if exact and options.device != "cpu":
        restrict_cublas()
    loaded = load_model(options, share, report)
    return loaded, read_facts(loaded)


def load_sharding(options: EngineOptions, sums: Sums) -> Sharding:
    """How to shard a model. UnsupportedModelError if that is impossible, before any weight is read."""
    config = load_config(options)
    reason = why_not_shardable(config)
    if _needs_whole_weights(options, config):
        reason = "its quantized weights cannot be read in shards"
    elif (Path(options.model) / OUTPUT_HEAD).is_file():
        reason = "its output head has rows for some tokens only"
    try:
        if reason is None:
            return shard(config, options.tensor_parallel, sums)
    except ValueError as error:
        reason = str(error)
    raise UnsupportedModelError(f"{options.model} cannot be sharded: {reason}")


def _needs_whole_weights(options: EngineOptions, config: PreTrainedConfig) -> bool:
    """Whether transformers must dequantize a GGUF file, which requires whole tensors."""
    if gguf_file_of(options.model) is None:
        return False
    try:
        return stored_weights(options, config) is None
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error


def _sums(options: EngineOptions, device: str) -> Sums:
    if options.tensor_parallel_sums != "auto":
        return options.tensor_parallel_sums
    return "whole" if device == "cpu" else "parts"
