"""Starts an engine: loads the model, chooses batch-invariant shapes, checks the logits, and times the passes."""

import logging
from collections.abc import Callable

import torch

from specpool.engine.cache.memory import return_freed_memory
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.embedded_pair import local_model
from specpool.engine.models.facts import read_facts, weights_fingerprint
from specpool.engine.models.loading import LoadedModel, load_model
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.gpu.gemm import restrict_cublas
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.run.contention import ContentionMonitor
from specpool.engine.run.engine import Engine
from specpool.engine.run.pass_selection import build_exact_pass
from specpool.engine.run.reservation import LimitCache
from specpool.engine.startup.library_logits import library_logits, refuse_other_logits
from specpool.engine.startup.proofs import Proof, measuring_alone, proof_key, read_proof, write_proof
from specpool.engine.startup.self_test import capture_graphs, logits_digest, numerics_fingerprint, self_test
from specpool.engine.startup.sharded import COMPILING, TESTING, start_sharded_engine
from specpool.engine.startup.step_times import measure_seconds_per_cached, measure_step_times

log = logging.getLogger(__name__)

OUTDATED_SHARE = 0.6
"""Measure again if a pass takes less than this share of its stored time: the machine was busy then."""

FREE_CORES = "keep some cores free for this worker"
# Compiled passes share their work among the threads that have a core.
ONE_THREAD = "try --threads 1: torch's threads wait for each other in every operation"


def load_engine(
    options: EngineOptions,
    exact: bool,
    startup_cache: bool = False,
    report: Callable[[str], None] = log.info,
    limit_cache: LimitCache | None = None,
    drafts: bool = True,
) -> Engine:
    """Load a model and prepare it for serving. UnsupportedModelError: the model cannot be served.

    `exact`: make every token's logits independent of its batch, and prove it on this device. `startup_cache`: on a
    CPU, reuse the self-test result and step times of an earlier start, and let only one worker measure at a time.
    `report`: called with each phase, such as "loading weights". `limit_cache`: see `Engine`. `drafts`: prepare for
    drafting.
    """
    models = {"model": options.model, "target_model": options.target_model}
    found = {name: local_model(model, report) for name, model in models.items() if model is not None}
    options = options.model_copy(update=found)
    if options.tensor_parallel > 1:
        engine = start_sharded_engine(options, exact, report, limit_cache)
        _measure(engine, report)
    else:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        loaded = load_model(options, report=report)
        if startup_cache and loaded.model.device.type == "cpu":
            engine = _load_cached(loaded, options, exact, report, limit_cache)
        else:
            engine = start_engine(loaded, options, exact, report, limit_cache=limit_cache, drafts=drafts)
            _measure(engine, report)
    engine.forget_all()  # the tests above touched much of the cache
    return_freed_memory()
    _log_notes(engine)
    if engine.facts.device.type == "cpu":
        waits = not isinstance(engine.forward_pass, NativeModel) and torch.get_num_threads() > 1
        engine.contention = ContentionMonitor(engine.step_seconds, ONE_THREAD if waits else FREE_CORES)
    info = engine.info()
    level = f", equivalence {'bitwise' if info.bitwise else 'numeric'}" if exact else ""  # a draft's does not matter
    log.info("ready: %s, %s%s", info.model, info.summary, level)
    log.debug("ready: %s", info)
    return engine


def start_engine(
    loaded: LoadedModel,
    options: EngineOptions,
    exact: bool,
    report: Callable[[str], None] = log.info,
    fingerprint: str = "",
    limit_cache: LimitCache | None = None,
    drafts: bool = True,
) -> Engine:
    """Build an engine from a loaded model, whose weights it takes over. Step times are not measured yet.

    `report`: called with each phase. `fingerprint`: fingerprint of the loaded weights; empty: compute it.
    `limit_cache`: see `Engine`. `drafts`: prepare for drafting.
    """
    # The library's model cannot run once a forward pass has taken its weights.
    facts, fingerprint = read_facts(loaded, options.fused), fingerprint or weights_fingerprint(loaded)
    if exact and facts.device.type == "cuda":
        restrict_cublas()
    expected = library_logits(loaded, facts)
    report(COMPILING)
    forward_pass, tiles = build_exact_pass(loaded, facts, options, exact)
    engine = Engine(loaded, facts, forward_pass, tiles or Tiles(), options, limit_cache=limit_cache)
    capture_graphs(engine, report, drafts)
    if exact:
        report(TESTING)
    refuse_other_logits(engine, expected)
    engine.bitwise = exact and tiles is not None and self_test(engine)
    engine.weights_fingerprint, engine.numerics_fingerprint = fingerprint, numerics_fingerprint(engine)
    return engine


def load_unproven_engine(options: EngineOptions, exact: bool) -> Engine:
    """Load a model for measurements alone: without a self-test, fingerprints, and step times by rows.

    `exact`: choose batch-invariant shapes, as for serving a target, which does not draft. UnsupportedModelError.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load_model(options)
    facts = read_facts(loaded, options.fused)
    if exact and facts.device.type == "cuda":
        restrict_cublas()
    forward_pass, tiles = build_exact_pass(loaded, facts, options, exact)
    engine = Engine(loaded, facts, forward_pass, tiles or Tiles(), options)
    capture_graphs(engine, drafts=not exact)
    _log_notes(engine)
    return engine


def _load_cached(
    loaded: LoadedModel,
    options: EngineOptions,
    exact: bool,
    report: Callable[[str], None],
    limit_cache: LimitCache | None,
) -> Engine:
    """Start an engine on a CPU, from the proof of an earlier start if it is still valid."""
    fingerprint = weights_fingerprint(loaded)
    key = proof_key(loaded, options, exact, fingerprint)
    proof = read_proof(key)
    if proof is not None:
        engine = _resume(loaded, options, exact, proof, report, limit_cache)
        if engine is not None:
            engine.weights_fingerprint = fingerprint
            return engine
        log.info("the stored proof does not match; running the self-test again")
        loaded = load_model(options, report=report)  # the discarded pass has taken the weights
        fingerprint = ""  # the files may have changed
    with measuring_alone(report):
        engine = start_engine(loaded, options, exact, report, fingerprint, limit_cache)
        _measure(engine, report)
    _store_proof(engine, key, exact)
    return engine


def _resume(
    loaded: LoadedModel,
    options: EngineOptions,
    exact: bool,
    proof: Proof,
    report: Callable[[str], None],
    limit_cache: LimitCache | None,
) -> Engine | None:
    """Build the engine and check it against `proof`; None if its compiled pass or its logits differ."""
    report(COMPILING)
    facts = read_facts(loaded, options.fused)
    forward_pass, tiles = build_exact_pass(loaded, facts, options, exact)
    if not isinstance(forward_pass, NativeModel) or forward_pass.library_digest != proof.library:
        return None
    engine = Engine(loaded, facts, forward_pass, tiles or Tiles(), options, limit_cache=limit_cache)
    if logits_digest(engine) != proof.logits:
        return None
    engine.bitwise = proof.bitwise
    engine.numerics_fingerprint = proof.logits if proof.bitwise else ""
    engine.step_seconds, engine.seconds_per_cached = proof.step_seconds, proof.seconds_per_cached
    if proof.step_seconds and measure_step_times(engine, [1])[1] < OUTDATED_SHARE * proof.step_seconds[1]:
        with measuring_alone(report):
            _measure(engine, report)
        _store_proof(engine, proof.key, exact)
    log.info("reusing the self-test result and step times of an earlier start")
    return engine


def _store_proof(engine: Engine, key: str, exact: bool) -> None:
    """Store the proof of a compiled pass, unless the self-test failed: the next start repeats it."""
    if not isinstance(engine.forward_pass, NativeModel) or engine.bitwise != exact:
        return
    write_proof(
        Proof(
            key=key,
            library=engine.forward_pass.library_digest,
            logits=engine.numerics_fingerprint or logits_digest(engine),
            bitwise=engine.bitwise,
            step_seconds=dict(engine.step_seconds),
            seconds_per_cached=engine.seconds_per_cached,
        )
    )


def _log_notes(engine: Engine) -> None:
    for note in engine.notes:
        log.warning("%s: %s", engine.loaded.name, note)


def _measure(engine: Engine, report: Callable[[str], None]) -> None:
    if not engine.layout.is_padded:  # the padded layout also moves columns, so times vary
        report("measuring step times")
        engine.forget_all()  # the tests leave pages in free slots
        engine.step_seconds = measure_step_times(engine)
        engine.seconds_per_cached = measure_seconds_per_cached(engine)
