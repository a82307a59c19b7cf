"""A plan from models that are measured here, one after the other."""

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from coordinator.prompts.templates import ChatTemplateError
from coordinator.prompts.tokenizer import EncodingError, TokenizerError
from specpool.client.prompts import own_prompts, read_prompt_file
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config import load_config
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.planning.measuring import PromptError, measure_draft, measure_target
from specpool.planning.plan import Acceptance, Model, replayed
from specpool.planning.settings import PROGRAM, PlanSettings
from specpool.rpc.config.settings import naming

# Passes of more rows than this are not measured but extrapolated.
MOST_ROWS = 512


def measured(settings: PlanSettings, console: Console) -> tuple[Model, list[tuple[Model, Acceptance]]]:
    """Measures all models: the target, and each draft with its acceptance."""
    disable_progress_bar()
    target, drafts = options_of(settings)
    with naming(PROGRAM, "prompts", OSError, ValueError):
        lines = own_prompts() if settings.prompts is None else read_prompt_file(settings.prompts)
        if not lines:
            raise ValueError(f"{settings.prompts} holds none")
    with naming(PROGRAM, "target", UnsupportedModelError):
        load_config(target)
    for draft in drafts:  # before minutes are spent on the target
        with naming(PROGRAM, "draft", UnsupportedModelError):
            load_config(draft)
    most = max(settings.batches)
    with (
        naming(PROGRAM, "target", UnsupportedModelError, TokenizerError, OSError),
        naming(PROGRAM, "prompts", PromptError, ChatTemplateError, EncodingError),
    ):
        rows = powers_of_two(most * (settings.longest + 1))
        model, answers = measure_target(target, lines[: settings.num_prompts], settings.max_tokens, rows, console)
    found = []
    for draft in drafts:
        with naming(PROGRAM, "draft", UnsupportedModelError, OSError):
            draft_model, agreed = measure_draft(draft, model, answers, powers_of_two(most), console)
        found.append((draft_model, replayed(agreed, settings.longest)))
    return model, found


def options_of(settings: PlanSettings) -> tuple[EngineOptions, list[EngineOptions]]:
    """Engine options of the target, and of each draft."""
    target, drafts = settings.target, settings.draft or []
    if target is None:
        with naming(PROGRAM, "target", OSError):
            pair = embedded_pair()
        target, drafts = str(pair.target), drafts or [str(pair.draft)]
    options = EngineOptions(
        model=target,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        max_model_len=settings.max_model_len,
        max_sequences=max(*settings.batches, settings.num_prompts),
    )
    of_drafts = {"device": settings.draft_device, "dtype": settings.draft_dtype}
    return options, [options.model_copy(update={**of_drafts, "model": draft}) for draft in drafts]


def powers_of_two(most: int) -> list[int]:
    """Numbers of rows in the passes to measure: at least two, the last no lower than `most` or MOST_ROWS."""
    return [2**power for power in range(max(1, (min(most, MOST_ROWS) - 1).bit_length()) + 1)]
