"""Hidden states of the target, which feature drafts read.

Computed for each batch, because storing them would take kilobytes per token.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specpool.distill.examples import Batch, Example

AT_ONCE = 16
"""Examples of a forward pass."""


class TargetStates:
    """Adds hidden states of the target to batches and examples. `layers`: numbers of layers; if empty, adds none."""

    def __init__(self, model: PreTrainedModel, layers: list[int]) -> None:
        source: Any = model
        self._body, self._device, self.layers = source.model, model.device, layers

    @torch.no_grad()
    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """States [B, T, layers * hidden] at tokens [B, T] that are padded on the right, as precise as on the wire."""
        found: dict[int, torch.Tensor] = {}

        def keep(number: int, layer: Any, inputs: Any, output: Any) -> None:
            found[number] = output[0] if isinstance(output, tuple) else output

        hooks = [self._body.layers[number - 1].register_forward_hook(partial(keep, number)) for number in self.layers]
        try:
            self._body(token_ids.to(self._device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([found[number] for number in self.layers], -1).bfloat16()

    def with_states(self, batch: Batch) -> Batch:
        """The batch with its states."""
        return replace(batch, states=self.of(batch.token_ids).float()) if self.layers else batch

    def examples(self, examples: Sequence[Example]) -> list[Example]:
        """The examples with their states."""
        if not self.layers:
            return list(examples)
        added = []
        for group in (examples[i : i + AT_ONCE] for i in range(0, len(examples), AT_ONCE)):
            states = self.of(pad_sequence([example.token_ids for example in group], batch_first=True))
            added += [
                replace(example, states=own[: len(example.token_ids)].cpu())
                for example, own in zip(group, states, strict=True)
            ]
        return added
