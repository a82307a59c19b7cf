"""The draft that is trained: some of the target's layers and a part of its output head."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from distill.files import in_one_step
from engine.loading import OUTPUT_HEAD


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


def save_draft(folder: Path, target: str, trained: dict[str, torch.Tensor]) -> None:
    """Puts what was trained together with the target's embeddings, as a folder that a draft worker can load."""
    whole: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    layers = 1 + max(int(name.split(".")[2]) for name in trained if name.startswith("body.layers."))
    changes = {"num_hidden_layers": layers, "tie_word_embeddings": True}
    draft: Any = type(whole)(type(whole.config)(**{**whole.config.to_dict(), **changes}))
    draft.model.embed_tokens.weight.data = whole.model.embed_tokens.weight.data
    body = {name.removeprefix("body."): weight for name, weight in trained.items() if name.startswith("body.")}
    missing = draft.model.load_state_dict(body, strict=False).missing_keys
    assert missing == ["embed_tokens.weight"], missing
    draft.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    save_file({"weight": trained["head"].contiguous(), "output_ids": trained["output_ids"]}, folder / OUTPUT_HEAD)


def most_frequent(counts: torch.Tensor, rows: int, always: list[int]) -> torch.Tensor:
    """Ids, ascending, of the `rows` tokens with the largest counts [vocab_size]; `always` are among them."""
    counts = counts.clone()
    counts[always] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:rows].sort().values


def save_trained(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """In one step, in bfloat16."""
    half = {name: w.bfloat16() if w.is_floating_point() else w for name, w in weights.items()}
    with in_one_step(path) as scratch:
        save_file({name: weight.contiguous() for name, weight in half.items()}, scratch)


def load_trained(path: Path) -> dict[str, torch.Tensor]:
    """What `save_trained` wrote, in float32."""
    return {name: w.float() if w.is_floating_point() else w for name, w in load_file(path).items()}
