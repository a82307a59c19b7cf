"""Chooses the forward pass of a model: compiled for the processor, of few torch operations, or the library's own."""

import torch

from engine.cache.memory import release_files
from engine.models.loading import LoadedModel, first_line
from engine.options import EngineOptions
from engine.passes.attention import LibraryModel
from engine.passes.forward_pass import ForwardPass
from engine.passes.gpu.graphs import CudaGraphs
from engine.passes.gpu.model import GpuModel, try_kernels
from engine.passes.gpu.recorded import RecordedModel
from engine.passes.lean import LeanModel, is_lean
from engine.passes.linear import can_prepack, prepack_linears
from engine.passes.native.model import NativeModel, can_compile, lossless_dtype


def build_forward_pass(loaded: LoadedModel, options: EngineOptions) -> ForwardPass:
    """The fastest pass that this model can have on its device. It takes over the weights of the library's model."""
    device, dtype = loaded.model.device, loaded.model.dtype
    forward_pass: ForwardPass = LibraryModel(loaded.model)
    if options.lean and is_lean(loaded.config):
        forward_pass = lean = LeanModel(loaded.model)
        if options.native and device.type == "cpu" and can_compile(lean, kept := lossless_dtype(lean)):
            native = NativeModel(lean, kept)
            release_files(loaded.model)
            return native
        if runs_kernels(device):
            fallback = why_no_kernels(lean)
            if fallback is None:
                kernels = GpuModel(lean, loaded.max_model_len)
                return RecordedModel(kernels, CudaGraphs()) if options.cuda_graphs else kernels
            lean.notes.append(f"runs slowly, by torch's operations, because its kernels cannot run here: {fallback}")
    if can_prepack(dtype, device):
        prepack_linears(forward_pass)
    if device == torch.device("cpu"):
        release_files(forward_pass)
    return forward_pass


def runs_kernels(device: torch.device) -> bool:
    """Whether passes on this device should consist of kernels of our own."""
    return device.type == "cuda"


def why_no_kernels(lean: LeanModel) -> str | None:
    """Why the kernels cannot run this model on its device; None if they can."""
    try:
        try_kernels(lean)
    except Exception as error:  # the compiler for this GPU may raise anything
        return first_line(error)
    return None
