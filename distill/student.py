"""The draft that is trained: some of the target's layers and a part of its output head."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class Student(nn.Module):
    """Frozen embeddings of the target; layers, norm and the rows of the head are its own."""

    output_ids: torch.Tensor
    row_of: torch.Tensor
    """By token: its row of the head, -1 if it has none."""

    def __init__(self, target: PreTrainedModel, layers: list[int], output_ids: torch.Tensor) -> None:
        super().__init__()
        source: Any = target
        config = type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": len(layers)})
        config._attn_implementation = "sdpa"
        self.body: Any = type(source.model)(config)
        self.body.embed_tokens.weight.data = source.model.embed_tokens.weight.data
        self.body.embed_tokens.weight.requires_grad_(False)
        for own, index in zip(self.body.layers, layers, strict=True):
            own.load_state_dict(source.model.layers[index].state_dict())
        self.body.norm.load_state_dict(source.model.norm.state_dict())
        self.head = nn.Parameter(source.get_output_embeddings().weight.data[output_ids].clone())
        self.register_buffer("output_ids", output_ids, persistent=False)
        row_of = torch.full((target.config.vocab_size,), -1)
        row_of[output_ids] = torch.arange(len(output_ids))
        self.register_buffer("row_of", row_of, persistent=False)

    def forward(self, token_ids: torch.Tensor, attention_mask: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Logits [chosen, rows of the head] at the chosen positions of `token_ids` [B, T], padded on the right.

        `attention_mask` [B, T]: 1 for tokens, 0 for padding. `chosen` [B, T]: a mask.
        """
        hidden = self.body(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        logits: torch.Tensor = hidden[chosen] @ self.head.T
        return logits

    def trained(self) -> dict[str, torch.Tensor]:
        """All that differs from the target, by name."""
        weights = {name: weight for name, weight in self.state_dict().items() if "embed_tokens" not in name}
        return {**weights, "output_ids": self.output_ids.int()}

    def learn(self, trained: dict[str, torch.Tensor]) -> None:
        """Takes over what `trained` returned for a student of as many layers and the same head."""
        weights = {name: weight for name, weight in trained.items() if name != "output_ids"}
        missing, unexpected = self.load_state_dict(weights, strict=False)
        other = [*unexpected, *(name for name in missing if "embed_tokens" not in name)]
        assert not other, other


def most_frequent(counts: torch.Tensor, rows: int, always: list[int]) -> torch.Tensor:
    """Ids, ascending, of the `rows` tokens with the largest counts [vocab_size]; `always` are among them."""
    counts = counts.clone()
    counts[always] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:rows].sort().values
