"""Hidden states of a target on its dialogues, for feature drafts. Stored in bfloat16 beside the dialogues."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specpool.distill.corpus import Dialogues, atomic_write
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine


def write_states(engine: Engine, dialogues: Dialogues, layers: list[int], path: Path) -> None:
    """Write the states [tokens, layers * hidden] after these numbers of layers, atomically."""
    states = []
    for token_ids in dialogues.token_ids.split(dialogues.lengths.tolist()):
        span = Span(0, 0, token_ids.tolist(), 0, num_states=len(token_ids))
        states.append(engine.forward_with_states([span], tuple(layers))[1].cpu())
    with atomic_write(path) as partial:
        save_file({"states": torch.cat(states)}, partial, {"layers": _named(layers)})


def has_states(path: Path, layers: list[int]) -> bool:
    """Whether a file has the states after these layers."""
    if not path.is_file():
        return False
    with safe_open(path, "pt") as file:
        return bool((file.metadata() or {}).get("layers") == _named(layers))


def read_states(path: Path) -> torch.Tensor:
    """States [tokens, width], mapped into memory."""
    with safe_open(path, "pt") as file:
        states: torch.Tensor = file.get_tensor("states")
    return states


def _named(layers: list[int]) -> str:
    return ",".join(map(str, layers))
