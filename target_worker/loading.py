"""Loads a target and the draft that it carries, and checks that they fit each other."""

from collections.abc import Callable
from dataclasses import replace

from specpool.engine.config.options import MTP, EngineOptions, Int8RefusedError, int8_refusal
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.config.target_options import TargetOptions
from specpool.engine.models.preflight import InvalidOptionError, check_options
from specpool.engine.models.weights import download_weights
from specpool.engine.run.engine import Engine
from specpool.engine.run.reservation import CacheNeeds, LimitCache
from specpool.engine.startup.loading import load_engine
from specpool.protocol.worker_info import why_not_a_pair
from target_worker.memory import PairMemory

Report = Callable[[str], None]


def load_target(
    options: EngineOptions, startup_cache: bool, report: Report, limit_cache: LimitCache | None = None
) -> Engine:
    """Load a target and report the phases. Raises UnsupportedModelError."""
    engine = load_engine(EngineOptions.of(options), True, startup_cache, report, limit_cache, drafts=False)
    if engine.loaded.features is not None:
        raise UnsupportedModelError(f"{options.model} is a draft that reads hidden states, not a target")
    return engine


def load_pair(options: TargetOptions, startup_cache: bool, report: Report) -> tuple[Engine, Engine]:
    """Load a target and the draft that it carries. Raises UnsupportedModelError, InvalidOptionError."""
    draft = options.draft_options
    assert draft is not None

    def load_draft(needs: CacheNeeds, limit_cache: LimitCache) -> Engine:
        return _load_draft(draft, needs, startup_cache, report, limit_cache)

    if draft.model == MTP:  # refuse a checkpoint without the layer before loading the target
        download_weights(EngineOptions.of(options), report)
        check_options(draft, {"model": "draft"})
    memory = PairMemory(load_draft, options.draft_kv_memory)
    engine = load_target(options, startup_cache, report, memory.limit_target)
    _check_pair(engine, memory.draft)
    return engine, memory.draft


def _load_draft(
    options: EngineOptions, target: CacheNeeds, startup_cache: bool, report: Report, limit_cache: LimitCache
) -> Engine:
    """Load the draft on the target's device, with the same memory limit for grammars."""
    device = target.facts.device
    grammar_memory = target.options.resolve_grammar_memory(device.type)
    options = options.model_copy(update={"device": str(device), "grammar_memory": grammar_memory})
    try:
        # Drafts need not be batch-invariant: verification decides.
        return load_engine(options, False, startup_cache, lambda phase: report(f"draft: {phase}"), limit_cache)
    except Int8RefusedError as error:
        raise UnsupportedModelError(int8_refusal(error.needed, error.remedy, "draft-")) from None


def _check_pair(target: Engine, draft: Engine) -> None:
    """Refuse a draft with another tokenizer, or one that reads states that the target lacks."""
    reason = why_not_a_pair(draft.info(), replace(target.info(), returns_features=target.has_states))
    if reason is not None:
        raise InvalidOptionError("draft", reason)
