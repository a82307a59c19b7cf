"""Speed of transformers' `generate`, with the target of the pair."""

import statistics
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine import finished
from benchmarks.gpu.engines import SHAPE_SECONDS
from benchmarks.gpu.folders import make_models
from benchmarks.gpu.part import Findings, Settings
from benchmarks.report import seconds_of

MAX_SEQUENCES = 8


def measure_generate(settings: Settings, findings: Findings) -> None:
    """Measure greedy answers of the target, with its default cache and attention."""
    model = AutoModelForCausalLM.from_pretrained(
        make_models(settings) / "target", dtype=settings.torch_dtype, device_map={"": settings.device}
    ).eval()
    for batch in (count for count in settings.sizes.batches if count <= MAX_SEQUENCES):
        case = partial(add_speed, findings, model, settings, batch)
        findings.attempt(settings, f"{batch} sequences", SHAPE_SECONDS, case)


def add_speed(findings: Findings, model: Any, settings: Settings, batch: int) -> None:
    """Add a row: tokens per second after prompts as long as those of the rounds."""
    sizes = settings.sizes
    prompts = torch.arange(3, 3 + batch * sizes.lengths[0], device=settings.device).view(batch, -1)
    generate = partial(
        model.generate, prompts, attention_mask=torch.ones_like(prompts), do_sample=False, pad_token_id=0,
        max_new_tokens=sizes.max_tokens, min_new_tokens=sizes.max_tokens,
    )  # fmt: skip
    generate()
    seconds = statistics.median(seconds_of(partial(finished, generate)) for _ in range(sizes.runs))
    findings.add_row("generate", {
        "sequences": batch, "cached": sizes.lengths[0], "tokens": sizes.max_tokens,
        "tokens_per_s": round(batch * sizes.max_tokens / seconds, 1),
    })  # fmt: skip
