"""The sampling kernels as a GPU's compiler gets them, for tests that compile without a GPU."""

from typing import Any

from engine import sampling_kernel as sampling
from engine.passes.gpu.launching import UNFUSED

LOGITS = ("fp32", "bf16", "fp16")


def sampling_kernels() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """(kernel, signature, constants, options) for each kernel and type of logits. The signature names every parameter
    that is no constant; pointers are of 16-byte-aligned memory."""
    found = []
    for dtype in LOGITS:
        pointers = {"logits": f"*{dtype}", "numbers": "*i32"}
        search = pointers | {"few": f"*{dtype}", "least": "*fp32", "vocab": "i32"}
        limits = {"FIELDS": sampling.FIELDS, "FEW": sampling.FEW}
        found.append((sampling._find_least, search, limits, UNFUSED | {"num_warps": sampling.SEARCH_WARPS}))
        score = pointers | {"least": "*fp32", "best": "*i64", "vocab": "i32", "parts": "i32"}
        blocks = {"FIELDS": sampling.FIELDS, "PART": sampling.PART, "BLOCK": sampling.BLOCK}
        found.append((sampling._score, score, blocks, UNFUSED | {"num_warps": sampling.SCORE_WARPS}))
    return found
