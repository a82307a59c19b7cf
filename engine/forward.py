"""Which forward pass a model gets: compiled for the processor, of few torch operations, or the library's own."""

import logging

import torch
from torch import nn

from engine.attention import LibraryModel
from engine.lean import LeanModel, is_lean
from engine.linear import can_prepack, prepack_linears
from engine.loading import LoadedModel
from engine.memory import release_files
from engine.native.model import NativeModel, can_compile
from engine.options import EngineOptions

log = logging.getLogger(__name__)


def forward_pass(loaded: LoadedModel, options: EngineOptions) -> nn.Module:
    """A module that computes the logits of packed batches, and has taken over the weights of the library's model."""
    device, dtype = loaded.model.device, loaded.model.dtype
    model: nn.Module = LibraryModel(loaded.model)
    if options.lean and is_lean(loaded.config):
        model = lean = LeanModel(loaded.model)
        if options.native and can_compile(lean):
            model = NativeModel(lean)
            release_files(loaded.model)
            return model
    if can_prepack(dtype, device):
        prepack_linears(model)
    if device == torch.device("cpu"):
        release_files(model)
    return model
