"""The structures of decoder.c and of the files that it includes."""

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p

PRODUCTS = ("qkv", "out", "gate_up", "down")
NORMS = ("before_attention", "before_mlp", "after_attention", "after_mlp", "head_norms")


class Panel(Structure):
    """Weights of a few outputs of a product."""

    _fields_ = (("weight", c_void_p), ("kind", c_int64))


class Linear(Structure):
    """A product."""

    _fields_ = (
        ("panels", POINTER(Panel)),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("inputs", "outputs", "widened_from")),
    )


class Layer(Structure):
    """A layer of the decoder."""

    _fields_ = (*((name, Linear) for name in PRODUCTS), *((name, c_void_p) for name in (*NORMS, "keys", "values")))


class Model(Structure):
    """A model, or a rank's share of it."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate", "kv_heads", "columns")),
        *((name, c_void_p) for name in ("cosines", "sines", "norm")),
        ("embedding", Linear),
        ("head", Linear),
        ("eps", c_float),
        ("scaling", c_float),
    )


class Batch(Structure):
    """The input of a pass, and where it leaves its logits."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "results", "threads")),
        *((name, c_void_p) for name in ("token_ids", "positions", "columns", "result_rows", "workspace")),
        ("scores", c_int64),
        ("logits", c_void_p),
    )


class Space(Structure):
    """Where a pass keeps its numbers in the workspace."""

    _fields_ = tuple(
        (name, c_void_p) for name in ("hidden", "normed", "heads", "attended", "branch", "gate_up", "gated", "scores")
    )
