"""Compiles the forward pass (decoder.c), and declares its structs for ctypes."""

from collections.abc import Collection
from ctypes import CDLL, POINTER, Structure, c_float, c_int64, c_void_p
from pathlib import Path

from specpool.engine.native.compiler import POOL, VECTORS, compile_library

LINEARS = ("qkv", "inputs", "query_up", "key_ups", "value_ups", "out", "gate_up", "down", "router", "gate_ups", "downs")
NORMS = ("before_attention", "before_mlp", "after_attention", "after_mlp", "head_norms", "query_norm", "latent_norm")
RECURRENT_NUMBERS = ("taps", "taps_bias", "rate", "dt_bias", "gate_norm")


class Panel(Structure):
    """The weights of a few outputs."""

    _fields_ = (("weight", c_void_p), ("kind", c_int64))


class Linear(Structure):
    """A linear layer."""

    _fields_ = (
        ("panels", POINTER(Panel)),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("inputs", "outputs", "widened_from")),
    )


class Layer(Structure):
    """A decoder layer."""

    _fields_ = (
        *((name, Linear) for name in LINEARS),
        *((name, c_void_p) for name in ("correction", "shared_gate", *NORMS, "sinks")),
        *((name, c_int64) for name in ("window", "rotary", "is_gated")),
        ("softcap", c_float),
        *((name, c_void_p) for name in ("keys", "values", *RECURRENT_NUMBERS)),
        *((name, c_void_p) for name in ("states", "edges", "tail_inputs", "tail_gates")),
    )


class Routing(Structure):
    """How layers choose experts."""

    _fields_ = (
        *((name, c_int64) for name in ("experts", "top_k", "groups", "top_groups", "ranked_by")),
        *((name, c_int64) for name in ("is_sigmoid", "renormalizes")),
        ("size", c_int64),
        *((name, c_float) for name in ("scale", "epsilon")),
    )


class Activation(Structure):
    """How MLPs combine gate and up."""

    _fields_ = (("is_gelu", c_int64), *((name, c_float) for name in ("alpha", "limit", "shift")))


class RecurrenceSizes(Structure):
    """Sizes of all recurrent layers of a model. Only gated delta nets have heads."""

    _fields_ = (
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_size", "value_size")),
        *((name, c_int64) for name in ("taps", "features", "tail_rows")),
    )


class LatentSizes(Structure):
    """Sizes of heads with latent attention."""

    _fields_ = (*((name, c_int64) for name in ("key_dim", "rotary_dim", "value_dim")), ("eps", c_float))


class Rotary(Structure):
    """Rotary tables."""

    _fields_ = (("cosines", c_void_p), ("sines", c_void_p))


class Model(Structure):
    """A model, or a rank's shard of it."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate", "kv_heads", "columns")),
        ("tables", c_void_p),
        *((name, c_int64) for name in ("table_size", "page_size")),
        ("rotaries", POINTER(Rotary)),
        *((name, c_void_p) for name in ("norm", "input_norms")),
        ("norms_output", c_int64),
        ("embedding", Linear),
        ("head", Linear),
        ("fc", Linear),
        ("eps", c_float),
        ("scaling", c_float),
        ("embedding_scale", c_float),
        ("softcap", c_float),
        ("routing", Routing),
        ("activation", Activation),
        ("recurrence", RecurrenceSizes),
        ("latent", LatentSizes),
    )


class Batch(Structure):
    """The input of a pass, its workspace and its output."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "results", "threads")),
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "prefix_lengths", "offsets")),
        *((name, c_void_p) for name in ("result_rows", "workspace")),
        ("scores", c_int64),
        *((name, c_void_p) for name in ("logits", "input_states", "own_states")),
        ("num_state_layers", c_int64),
        ("state_layers", POINTER(c_int64)),
        ("states", c_void_p),
        ("num_segments", c_int64),
        ("segments", c_void_p),
    )


class Activations(Structure):
    """Addresses of the activations in the workspace."""

    _fields_ = (
        *((name, c_void_p) for name in ("hidden", "normed", "heads", "attended", "branch")),
        *((name, c_void_p) for name in ("gate_up", "gated", "joined", "scores", "rounded")),
    )


FOLDER = Path(__file__).parent
ROUNDED_FLAGS = ("-ffp-contract=off",)
"""No fused multiply-adds, so rounded activations give the same bits on every processor."""
SOURCES = (
    *(FOLDER / name for name in ("decoder.c", "latent.h", "experts.h", "short_conv.h")),
    *(FOLDER / name for name in ("delta_net.h", "recurrence.h", "rows.h", "segment.h")),
    *(FOLDER / name for name in ("gemm.h", "tiles.h", "rounded.h", "dots.h", "panels.h")),
    POOL,
    VECTORS,
)


def compile_decoder(
    head_dim: int, groups: int, kinds: Collection[str], rank: int = 0, rounded: bool = False, measured: bool = False
) -> CDLL | None:
    """Compile the library for this head size and `groups` query heads per KV head; None if this machine cannot.

    `rank`: features of a latent vector; 0: attention is not latent. `kinds`: of the weights, named as in panels.h.
    `rounded`: quantized kinds take activations rounded to 8 bits. `measured`: measure the time of the stages.
    """
    macros = (
        f"-DHEAD_DIM={head_dim}",
        f"-DGROUPS={groups}",
        f"-DRANK={rank}",
        "-DKINDS(X)=" + " ".join(f"X({kind})" for kind in sorted(kinds)),
        *(["-DROUND_ACTIVATIONS=1"] if rounded else []),
        *(["-DMEASURED"] if measured else []),
    )
    return compile_library("the forward pass", SOURCES, macros, ROUNDED_FLAGS if rounded else ())
