"""Starts an engine: loads the model, finds the shapes that are exact, refuses wrong logits, and measures the passes."""

import logging

import torch

from specpool.engine.config.options import EngineOptions
from specpool.engine.models.facts import read_facts
from specpool.engine.models.loading import LoadedModel, load_model
from specpool.engine.models.weights_fingerprint import weights_fingerprint
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.cublas import restrict_cublas
from specpool.engine.run.engine import Engine
from specpool.engine.run.pass_selection import build_exact_pass
from specpool.engine.startup.library_logits import library_logits, refuse_other_logits
from specpool.engine.startup.numerics_fingerprint import numerics_fingerprint
from specpool.engine.startup.self_test import self_test
from specpool.engine.startup.sharded import start_divided_engine
from specpool.engine.startup.step_times import measure_seconds_per_cached, measure_step_times

log = logging.getLogger(__name__)


def load_engine(options: EngineOptions, exact: bool) -> Engine:
    """Loads a model and makes it ready to serve. UnsupportedModelError says why it cannot be served.

    `exact`: make every token's logits independent of its batch, and prove it on this device.
    """
    if options.tensor_parallel > 1:
        engine = start_divided_engine(options, exact)
    else:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        engine = start_engine(load_model(options), options, exact)
    if not engine.layout.spare_columns:  # in a padded layout the time of a pass depends on what has to be moved for it
        engine.step_seconds = measure_step_times(engine)
        engine.seconds_per_cached = measure_seconds_per_cached(engine)
    recorded = engine.forward_pass
    if isinstance(recorded, CapturedModel) and recorded.capture is None:
        engine.notes.append("runs slowly: its kernels are launched one by one, because passes cannot be recorded here")
    for note in engine.notes:
        log.warning("%s: %s", engine.loaded.name, note)
    log.info("ready: %s", engine.info())
    return engine


def start_engine(loaded: LoadedModel, options: EngineOptions, exact: bool) -> Engine:
    """An engine for a loaded model, whose weights it takes over; its passes are not measured."""
    # All of these read the library's model, which cannot run once a forward pass has taken its weights.
    facts, fingerprint = read_facts(loaded), weights_fingerprint(loaded)
    if exact and facts.device.type == "cuda":
        restrict_cublas()
    expected = library_logits(loaded, facts)
    forward_pass, tiles = build_exact_pass(loaded, facts, options, exact)
    engine = Engine(loaded, facts, forward_pass, tiles or Tiles(), options)
    refuse_other_logits(engine, expected)
    engine.bitwise = exact and tiles is not None and self_test(engine)
    engine.weights_fingerprint, engine.numerics_fingerprint = fingerprint, numerics_fingerprint(engine)
    return engine
