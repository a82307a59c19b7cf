"""Saves the models of the parts that load them like a worker: a target, a draft model, and an EAGLE-3 head."""

from pathlib import Path

import torch

from benchmarks.gpu.engines import free_models
from benchmarks.gpu.head import save_head
from benchmarks.gpu.part import Settings
from benchmarks.pair import save_model, successors_of_pair
from benchmarks.shapes import SHAPES
from specpool.engine.config.devices import pick_device

ACCEPTANCE = 0.7
"""Share of tokens that the draft model and the head get right."""
OUTPUTS = 32_000
"""Maximum tokens that the head can draft, as many as published heads. The target generates no others."""
DRAFTS = ("head", "draft")
"""Folders of drafts."""


def num_generated_tokens(settings: Settings) -> int:
    """Number of distinct tokens that the target generates, those with the lowest ids."""
    return min(OUTPUTS, int(SHAPES[settings.target]["vocab_size"]))


def make_models(settings: Settings) -> Path:
    """The folder of all models. The first part that needs them creates them."""
    folder, done = Path(settings.scratch), Path(settings.scratch) / "made"
    if not done.exists():
        device = pick_device(settings.device)
        torch.manual_seed(0)
        target, draft = successors_of_pair(num_generated_tokens(settings), ACCEPTANCE)
        save_model(folder / "target", settings.target, target, device, settings.torch_dtype)
        save_model(folder / "draft", settings.draft, draft, device, settings.torch_dtype)
        save_head(folder / "head", folder / "target", settings.target, draft, device, settings.torch_dtype)
        done.touch()
        free_models()  # the workers need the memory
    return folder
