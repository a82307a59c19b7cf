"""The tokens that a model's output head knows."""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Head:
    """The outputs of a model, one per token unless `output_ids` says otherwise."""

    vocab_size: int
    output_ids: torch.Tensor | None = None
    """The token of each output. None: its index."""

    @property
    def outputs(self) -> int:
        """Rows of the head."""
        return self.vocab_size if self.output_ids is None else len(self.output_ids)

    def token_ids(self, outputs: torch.Tensor) -> torch.Tensor:
        """Map outputs, on the host or on the model's device, to token ids."""
        if self.output_ids is None:
            return outputs
        return (self._host_ids if outputs.device.type == "cpu" else self.output_ids)[outputs]

    @cached_property
    def _host_ids(self) -> torch.Tensor:
        assert self.output_ids is not None
        return self.output_ids.cpu()

    def over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] from logits [n, outputs]. Tokens without an output get minus infinity."""
        if self.output_ids is None:
            return logits
        expanded = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        expanded[:, self.output_ids] = logits
        return expanded
