"""Chooses the forward pass of a model, and the shapes that make it batch invariant.

The candidates, fastest first: compiled code, GPU kernels, fused torch operations, the library's own modules.
"""

import torch

from specpool.engine.cache.memory import release_files
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, first_line
from specpool.engine.models.facts import ModelFacts
from specpool.engine.models.loading import LoadedModel
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.attention import LibraryModel
from specpool.engine.passes.experts import set_expert_tiles
from specpool.engine.passes.families import is_fusable
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.graphs import CudaGraphs
from specpool.engine.passes.gpu.model import GpuModel, try_kernels
from specpool.engine.passes.modules import can_prepack, chunk_activations, prepack_linears
from specpool.engine.passes.native.model import NativeModel, compile_pass
from specpool.engine.passes.native.sharded import ShardedNativeModel
from specpool.engine.probes.batch_invariance import ONE_SHAPE, choose_tiles
from specpool.engine.probes.kernels import choose_gemms
from specpool.engine.sharding.group import SINGLE_RANK, SingleRank


def build_exact_pass(
    loaded: LoadedModel, facts: ModelFacts, options: EngineOptions, exact: bool, group: SingleRank = SINGLE_RANK
) -> tuple[ForwardPass, Tiles | None]:
    """Build the pass of a model or a rank's shard, and choose the shapes that make it batch invariant, if any.

    `exact`: whether batch invariance is needed. `group`: the ranks of the model. UnsupportedModelError.
    """
    forward_pass = build_forward_pass(loaded, options, group)
    return forward_pass, _tiles(forward_pass, facts, options, exact)


def build_forward_pass(loaded: LoadedModel, options: EngineOptions, group: SingleRank = SINGLE_RANK) -> ForwardPass:
    """Build the fastest pass for this model on its device. It takes over the weights of the library's model.

    `group`: the ranks of the model; with several, `FusedModel` must support it. UnsupportedModelError: this rank cannot
    run the GPU kernels, but others may; or the pass does not support the required activations.
    """
    device, dtype = loaded.model.device, loaded.model.dtype
    forward_pass: ForwardPass
    if not is_fusable(loaded.config) or not (options.fused or group is not SINGLE_RANK):
        forward_pass = LibraryModel(loaded.model)
    else:
        forward_pass = fused = FusedModel(loaded.model, group)
        if options.native and device.type == "cpu":
            pass_class = NativeModel if group is SINGLE_RANK else ShardedNativeModel
            native = compile_pass(fused, pass_class, options.activations)
            if native is not None:
                release_files(loaded.model)
                return native
        fused.dequantize()
        if runs_kernels(device):
            fallback = why_no_kernels(fused)
            if fallback is None:
                kernels = GpuModel(fused, loaded.max_model_len, options.max_sequences)
                return CapturedModel(kernels, CudaGraphs()) if options.cuda_graphs else kernels
            if group is not SINGLE_RANK:
                raise UnsupportedModelError(
                    f"a model cannot be sharded across GPUs that cannot run its kernels: {fallback}"
                )
            fused.notes.append(f"runs slowly, on torch operations, because its kernels cannot run here: {fallback}")
    if can_prepack(dtype, device):
        prepack_linears(forward_pass)
    if device == torch.device("cpu"):
        release_files(forward_pass)
    return forward_pass


def runs_kernels(device: torch.device) -> bool:
    """Whether this device should run our own kernels."""
    return device.type == "cuda"


def why_no_kernels(fused: FusedModel) -> str | None:
    """Why our kernels cannot run this model on its device; None if they can."""
    try:
        try_kernels(fused)
    except Exception as error:  # the GPU compiler may raise anything
        return first_line(error)
    return None


def _tiles(forward_pass: ForwardPass, facts: ModelFacts, options: EngineOptions, exact: bool) -> Tiles | None:
    """Choose the GEMMs of a pass, and the tiles that make it batch invariant if `exact`; None if no tiles do."""
    model = forward_pass.model if isinstance(forward_pass, CapturedModel) else forward_pass
    if isinstance(model, GpuModel):
        capture = forward_pass.capture if isinstance(forward_pass, CapturedModel) else None
        forced = None if options.gemm == "auto" else options.gemm
        exists = choose_gemms(model, options.resolve_max_num_batched_tokens(facts.device.type), exact, forced, capture)
        if facts.device.type == "cuda":
            torch.cuda.empty_cache()  # trials must not reduce the KV cache
        if exists:
            return Tiles()
        forward_pass.notes.append(
            f"runs slowly, {ONE_SHAPE.max_rows} rows at a time: no faster GEMM is batch invariant here"
        )
        return ONE_SHAPE
    if not exact or forward_pass.exact_by_construction:
        return Tiles()
    chunk_activations(forward_pass)
    attention = (facts.kv_heads, facts.query_groups, facts.head_dim)
    tiles = choose_tiles(forward_pass, attention if forward_pass.plans_attention else None)
    set_expert_tiles(forward_pass, tiles or Tiles())
    return tiles
