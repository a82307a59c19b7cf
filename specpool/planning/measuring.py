"""Measurements for a plan: costs of passes, the target's answers, and each draft's agreement with them.

Load one model at a time, so that models do not compete for memory or cores.
"""

import gc
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from coordinator.prompts.templates import ChatTemplateError
from coordinator.prompts.tokenizer import EncodingError, TokenizerError
from specpool.client.prompts import PromptLine, own_prompts, read_prompt_file
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config import load_config
from specpool.engine.models.eagle import features_of_draft
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import load_unproven_engine
from specpool.engine.startup.step_times import measure_seconds_per_cached, timed_passes
from specpool.planning.answers import Answer, PromptError, add_states, encode_prompts, record_predictions, write_answers
from specpool.planning.plausibility import REPEATS, check_times, measure_times
from specpool.planning.prediction import Acceptance, Model, replay_acceptance
from specpool.planning.progress import Phases
from specpool.planning.replaying import Recording
from specpool.planning.settings import OTHER_TOKENIZER, PROGRAM, PlanSettings
from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.worker_info import readable_name
from specpool.rpc.config.settings import naming

# Passes with more rows are extrapolated instead of measured.
MAX_ROWS = 512
# Time for the passes of a model, and by default for the answers and for the agreement of a draft.
PASSES_SECONDS, ANSWERS_SECONDS = 8.0, 10.0
PHASES = 3
"""Phases of each model: loading it, measuring its passes, and writing or checking answers."""


def measure_pair(settings: PlanSettings, console: Console) -> tuple[Model, list[tuple[Model, Acceptance]]]:
    """Measure the target, then each draft with its acceptance. An invalid setting exits with one line that names it."""
    disable_progress_bar()
    target, drafts = options_of(settings)
    with naming(PROGRAM, "prompts", OSError, ValueError):
        lines = own_prompts() if settings.prompts is None else read_prompt_file(settings.prompts)
        if not lines:
            raise ValueError(f"{settings.prompts} has no prompts")
    with naming(PROGRAM, "target", UnsupportedModelError):
        load_config(target)
    with naming(PROGRAM, "draft", UnsupportedModelError):  # before measuring the target for minutes
        features = [features_of_draft(draft) for draft in drafts]
    layers = {each.layers for each in features if each is not None}
    phases = Phases(console, PHASES * (1 + len(drafts)))
    with phases.shown():
        return _measure_models(settings, target, drafts, layers, lines, phases)


def _measure_models(
    settings: PlanSettings,
    target: EngineOptions,
    drafts: Sequence[EngineOptions],
    layers: Collection[tuple[int, ...]],
    lines: Sequence[PromptLine],
    phases: Phases,
) -> tuple[Model, list[tuple[Model, Acceptance]]]:
    max_batch, max_k = max(settings.batches), settings.max_num_speculative_tokens
    is_explicit = not settings.model_fields_set.isdisjoint({"max_tokens", "num_prompts"})
    seconds = math.inf if is_explicit else ANSWERS_SECONDS
    with (
        naming(PROGRAM, "target", UnsupportedModelError, TokenizerError, OSError),
        naming(PROGRAM, "prompts", PromptError, ChatTemplateError, EncodingError, InvalidArgumentError),
    ):
        engine = _load(target, exact=True, phases=phases)  # with the settings used for serving
        prompts = encode_prompts(engine, lines[: settings.num_prompts], settings.max_tokens)
        model = _measure(engine, powers_of_two(max_batch * (max_k + 1)), phases)
        answers = write_answers(engine, prompts, settings.max_tokens, seconds, phases)
        add_states(engine, answers, layers)
    del engine
    results = []
    for draft in drafts:
        with naming(PROGRAM, "draft", UnsupportedModelError, OSError):
            draft_model, recordings = _measure_draft(draft, model, answers, powers_of_two(max_batch), seconds, phases)
        results.append((draft_model, replay_acceptance(recordings, max_k)))
    return model, results


def options_of(settings: PlanSettings) -> tuple[EngineOptions, list[EngineOptions]]:
    """Return the engine options of the target, and of each draft."""
    target, drafts = settings.target, settings.draft or []
    if target is None:
        with naming(PROGRAM, "target", OSError):
            pair = embedded_pair()
        target, drafts = str(pair.target), drafts or [str(pair.draft)]
    options = EngineOptions(
        model=target,
        device=settings.device,
        dtype=settings.dtype,
        activations=settings.activations,
        threads=settings.threads,
        max_model_len=settings.max_model_len,
        max_sequences=max(*settings.batches, settings.num_prompts),
    )
    changes = {
        "device": settings.draft_device,
        "dtype": settings.draft_dtype,
        "activations": settings.draft_activations,
        "target_model": target,
    }
    return options, [options.model_copy(update={**changes, "model": draft}) for draft in drafts]


def powers_of_two(maximum: int) -> list[int]:
    """Return the row counts to measure: at least two, up to a power of two that covers `maximum` or MAX_ROWS."""
    return [2**power for power in range(max(1, (min(maximum, MAX_ROWS) - 1).bit_length()) + 1)]


def _measure_draft(
    options: EngineOptions,
    target: Model,
    answers: Sequence[Answer],
    rows: Sequence[int],
    seconds: float,
    phases: Phases,
) -> tuple[Model, list[Recording]]:
    engine = _load(options, exact=False, phases=phases)
    if engine.loaded.tokenizer.fingerprint != target.tokenizer_fingerprint:
        raise UnsupportedModelError(f"{options.model} uses a different tokenizer than {target.name}; {OTHER_TOKENIZER}")
    model = _measure(engine, rows, phases)
    return model, record_predictions(engine, answers, seconds, phases)


def _load(options: EngineOptions, exact: bool, phases: Phases) -> Engine:
    gc.collect()  # modules of the previous model are in reference cycles
    torch.cuda.empty_cache()
    with phases.phase(f"loading {readable_name(options.model)}"):
        return load_unproven_engine(options, exact)


def _measure(engine: Engine, row_counts: Sequence[int], phases: Phases) -> Model:
    """Measure passes. Raises ImplausibleTimesError."""
    with (
        phases.phase("measuring its passes", REPEATS * len(row_counts)) as report,
        timed_passes(engine, row_counts) as passes,
    ):
        step_seconds = measure_times(lambda rows: passes[rows](), list(passes), PASSES_SECONDS, report)
    check_times(readable_name(engine.loaded.name), step_seconds)
    engine.step_seconds, engine.seconds_per_cached = step_seconds, measure_seconds_per_cached(engine)
    return replace(Model.of(engine.info()), revision=getattr(engine.loaded.config, "_commit_hash", None))
