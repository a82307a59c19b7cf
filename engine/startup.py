"""Starts an engine: loads the model, finds the shapes that are exact, refuses wrong logits, and measures the passes."""

import logging

import torch

from engine.engine import Engine
from engine.forward import build_forward_pass
from engine.models.facts import ModelFacts, read_facts
from engine.models.fingerprints import weights_fingerprint
from engine.models.loading import LoadedModel, load_model
from engine.numerics import Tiles
from engine.options import EngineOptions
from engine.passes.activations import activate_in_pieces
from engine.passes.forward_pass import ForwardPass
from engine.passes.gpu.cublas import restrict_cublas
from engine.passes.gpu.model import GpuModel
from engine.passes.gpu.recorded import RecordedModel
from engine.probes.exactness import ONE_SHAPE, choose_tiles
from engine.probes.kernels import choose_products
from engine.probes.library_logits import library_logits, refuse_other_logits
from engine.probes.numerics import numerics_fingerprint
from engine.probes.self_test import self_test
from engine.probes.step_times import measure_seconds_per_cached, measure_step_times

log = logging.getLogger(__name__)


def load_engine(options: EngineOptions, exact: bool) -> Engine:
    """Loads a model and makes it ready to serve. UnsupportedModelError says why it cannot be served.

    `exact`: make every token's logits independent of its batch, and prove it on this device.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    engine = start_engine(load_model(options), options, exact)
    if not engine.layout.spare_columns:  # in a padded layout the time of a pass depends on what has to be moved for it
        engine.step_seconds = measure_step_times(engine)
        engine.seconds_per_cached = measure_seconds_per_cached(engine)
    recorded = engine.forward_pass
    if isinstance(recorded, RecordedModel) and recorded.record is None:
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
    forward_pass = build_forward_pass(loaded, options)
    tiles = _tiles(forward_pass, facts, options, exact)
    engine = Engine(loaded, facts, forward_pass, tiles or Tiles(), options)
    refuse_other_logits(engine, expected)
    engine.bitwise = exact and tiles is not None and self_test(engine)
    engine.weights_fingerprint, engine.numerics_fingerprint = fingerprint, numerics_fingerprint(engine)
    return engine


def _tiles(forward_pass: ForwardPass, facts: ModelFacts, options: EngineOptions, exact: bool) -> Tiles | None:
    """Chooses the products of a pass where there is a choice, and finds the tiles that make it exact if it shall be.

    None if no tiles do.
    """
    model = forward_pass.model if isinstance(forward_pass, RecordedModel) else forward_pass
    if isinstance(model, GpuModel):
        record = forward_pass.record if isinstance(forward_pass, RecordedModel) else None
        wanted = None if options.products == "auto" else options.products
        exists = choose_products(model, options.forward_tokens(facts.device.type), exact, wanted, record)
        if facts.device.type == "cuda":
            torch.cuda.empty_cache()  # what was only tried must not count as used when the KV cache is sized
        if exists:
            return Tiles()
        forward_pass.notes.append(
            f"runs slowly, {ONE_SHAPE.max_rows} rows at a time: other products are not exact here"
        )
        return ONE_SHAPE
    if not exact or forward_pass.exact_by_construction:
        return Tiles()
    activate_in_pieces(forward_pass)
    attention = (facts.kv_heads, facts.query_groups, facts.head_dim)
    return choose_tiles(forward_pass, attention if forward_pass.plans_attention else None)
