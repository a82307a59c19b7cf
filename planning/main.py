"""`specpool plan`: measures a pair for a minute, and predicts what it gains in any batch with any draft length."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from coordinator.prompts.templates import ChatTemplateError
from coordinator.prompts.tokenizer import EncodingError, TokenizerError
from engine.models.embedded_pair import embedded_pair
from engine.models.loading import UnsupportedModelError, load_config
from engine.options import Dtype, EngineOptions
from planning.measuring import PromptError, measure_draft, measure_target
from planning.plan import Plan, Terms, make_plan
from planning.report import as_json, show
from rpc.logs import configure_logging
from rpc.settings import LogLevel, Seconds, Settings, naming
from specpool.cli.prompts import own_prompts, read_prompt_file

PROGRAM = "specpool plan"
WIDTH = 120
# Passes of more rows than this are not measured but extrapolated.
MOST_ROWS = 512


class PlanSettings(Settings):
    """Measures a pair, predicts its speed by batch and draft length, and recommends what to run it with.

    Acceptance is that of greedy decoding; samples are accepted less often.
    """

    target: str | None = Field(None, description="hub id, folder or GGUF file; default: the embedded pair's")
    draft: list[str] | None = Field(
        None,
        min_length=1,
        description="hub id, folder or GGUF file of one draft or several; default: the embedded pair's",
    )
    prompts: Path | None = Field(None, description="JSONL file, as for generate; default: a few of our own")
    num_prompts: int = Field(16, ge=1, le=4096, description="number of prompts that the target answers, in one batch")
    max_tokens: int = Field(64, ge=2, description="tokens of an answer, at most")
    batches: list[Annotated[int, Field(ge=1, le=4096)]] = Field(
        [1, 2, 4, 8, 16, 32], min_length=1, description="sequences of a round to predict for"
    )
    longest: int = Field(8, ge=1, le=64, description="draft tokens of a round, at most")
    device: str = Field("auto", description="device of the target")
    draft_device: str = Field("auto", description="device of the drafts")
    dtype: Dtype = Field("auto", description="weights of the target")
    draft_dtype: Dtype = Field("auto", description="weights of the drafts")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of a model; default: torch's choice")
    max_model_len: int | None = Field(
        None, ge=16, description="positions a sequence can have; default: the model's own limit, at most 4096"
    )
    exchange_seconds: Seconds = Field(0.001, ge=0, description="time of a message to a worker and back")
    shared: bool | None = Field(
        None, description="whether target and draft take turns on one device; default: if their devices are the same"
    )
    output: Path | None = Field(None, description="folder for the result and a plot")
    log_level: LogLevel = Field("warning", description="least severe messages logged")

    @field_validator("output")
    @classmethod
    def _can_be_plotted(cls, output: Path | None) -> Path | None:
        if output is not None and find_spec("matplotlib") is None:
            raise ValueError("the plot needs matplotlib: pip install 'specpool[bench]'")
        return output

    @model_validator(mode="after")
    def _has_a_draft(self) -> Self:
        if self.target is not None and self.draft is None:
            raise ValueError("draft: name one for this target")
        return self


def main() -> None:
    """Entry point."""
    settings = PlanSettings.load(PROGRAM)
    configure_logging(settings.log_level)
    disable_progress_bar()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    if settings.output is not None:
        with naming(PROGRAM, "output", OSError):
            settings.output.mkdir(parents=True, exist_ok=True)
    plan = planned(settings, console)
    show(plan, console)
    result = json.dumps(as_json(plan))
    if settings.output is not None:
        with naming(PROGRAM, "output", OSError):
            keep(plan, result, settings.output)
    print(result)


def planned(settings: PlanSettings, console: Console) -> Plan:
    """Measures all models, one after the other."""
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
    measured = []
    for draft in drafts:
        with naming(PROGRAM, "draft", UnsupportedModelError, OSError):
            measured.append(measure_draft(draft, model, answers, powers_of_two(most), console))
    terms = Terms(settings.batches, settings.longest, settings.exchange_seconds, settings.shared)
    return make_plan(model, measured, terms)


def options_of(settings: PlanSettings) -> tuple[EngineOptions, list[EngineOptions]]:
    """How to run the target, and each draft."""
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
    """Numbers of rows to measure passes of: at least two, the last one no lower than `most` or MOST_ROWS."""
    return [2**power for power in range(max(1, (min(most, MOST_ROWS) - 1).bit_length()) + 1)]


def keep(plan: Plan, result: str, folder: Path) -> None:
    """Writes the result and a plot."""
    from planning.figure import plan_figure  # matplotlib comes with an extra of its own

    (folder / "plan.json").write_text(result + "\n")
    plan_figure(plan).savefig(folder / "plan.png", dpi=110)


if __name__ == "__main__":
    main()
