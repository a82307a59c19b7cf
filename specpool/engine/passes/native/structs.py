"""The structs of decoder.c and its headers, as ctypes."""

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p

LINEARS = ("qkv", "out", "gate_up", "down")
NORMS = ("before_attention", "before_mlp", "after_attention", "after_mlp", "head_norms")


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

    _fields_ = (*((name, Linear) for name in LINEARS), *((name, c_void_p) for name in (*NORMS, "keys", "values")))


class Model(Structure):
    """A model, or a rank's shard of it."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate", "kv_heads", "columns")),
        *((name, c_void_p) for name in ("cosines", "sines", "norm")),
        ("embedding", Linear),
        ("head", Linear),
        ("fc", Linear),
        ("eps", c_float),
        ("scaling", c_float),
    )


class Batch(Structure):
    """The input of a pass, its workspace and its output."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "results", "threads")),
        *((name, c_void_p) for name in ("token_ids", "positions", "columns", "prefix_lengths", "offsets")),
        *((name, c_void_p) for name in ("result_rows", "workspace")),
        ("scores", c_int64),
        *((name, c_void_p) for name in ("logits", "input_states", "own_states")),
        ("num_state_layers", c_int64),
        ("state_layers", POINTER(c_int64)),
        ("states", c_void_p),
    )


class Activations(Structure):
    """Addresses of the activations in the workspace."""

    _fields_ = (
        *((name, c_void_p) for name in ("hidden", "normed", "heads", "attended", "branch")),
        *((name, c_void_p) for name in ("gate_up", "gated", "joined", "scores", "rounded")),
    )
