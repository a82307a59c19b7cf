"""The draft that is trained: some of the target's layers and a part of its output head."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specpool.engine.models.draft_folder import count_layers, draft_config


class Student(nn.Module):
    """Frozen embeddings of the target; layers, norm and the rows of the head are its own."""

    output_ids: torch.Tensor
    row_of: torch.Tensor
    """The row of the head by token; -1 for a token without one."""

    def __init__(self, target: PreTrainedModel, layers: list[int], output_ids: torch.Tensor) -> None:
        super().__init__()
        source: Any = target
        config = draft_config(target.config, len(layers))
        config._attn_implementation = "sdpa"
        self.body: Any = type(source.model)(config)
        self.body.embed_tokens.weight.data = source.model.embed_tokens.weight.data
        self.body.embed_tokens.weight.requires_grad_(False)
        for own, index in zip(self.body.layers, layers, strict=True):
            own.load_state_dict(source.model.layers[index].state_dict())
        self.body.norm.load_state_dict(source.model.norm.state_dict())
        self.head = nn.Parameter(source.get_output_embeddings().weight.data[output_ids].clone())
        self.register_buffer("output_ids", output_ids, persistent=False)
        self.register_buffer("row_of", _rows(output_ids, target.config.vocab_size), persistent=False)

    def forward(self, token_ids: torch.Tensor, attention_mask: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Logits [chosen, rows of the head] at the chosen positions of `token_ids` [B, T], padded on the right.

        `attention_mask` [B, T]: 1 for tokens, 0 for padding. `chosen` [B, T]: a mask.
        """
        hidden = self.body(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        logits: torch.Tensor = hidden[chosen] @ self.head.T
        return logits

    def trained(self) -> dict[str, torch.Tensor]:
        """Weights that differ from the target's, by name."""
        weights = {name: weight for name, weight in self.state_dict().items() if "embed_tokens" not in name}
        return {**weights, "output_ids": self.output_ids.int()}

    def learn(self, trained: dict[str, torch.Tensor]) -> None:
        """Loads what `trained` returned for a student with as many layers and rows of the head."""
        weights = {name: weight for name, weight in trained.items() if name != "output_ids"}
        missing, unexpected = self.load_state_dict(weights, strict=False)
        other = [*unexpected, *(name for name in missing if "embed_tokens" not in name)]
        assert not other, other
        self.output_ids = trained["output_ids"].long().to(self.head.device)
        self.row_of = _rows(self.output_ids, len(self.row_of))


def refuse_target(config: PreTrainedConfig, layers: list[int]) -> None:
    """ValueError if no student with these layers can be made of a target."""
    body = _body(config, 1)
    if not all(hasattr(body, name) for name in ("layers", "norm", "embed_tokens")):
        raise ValueError(f"models of the kind {config.model_type} are not built like Llama")
    if max(layers) >= config.num_hidden_layers:
        raise ValueError(f"{max(layers)} is not below {config.num_hidden_layers}, the number of the target's layers")


def refuse_misfit(trained: dict[str, torch.Tensor], config: PreTrainedConfig) -> None:
    """ValueError if these are not the weights of a student of a target."""
    if not {"head", "output_ids"} <= trained.keys():
        raise ValueError("not what was trained of a draft: it has no head")
    output_ids = trained["output_ids"]
    if not 0 <= int(output_ids.min()) <= int(output_ids.max()) < config.vocab_size:
        raise ValueError(f"output_ids: {int(output_ids.max())} is no token of a target with {config.vocab_size}")
    shapes = {
        f"body.{name}": weight.shape for name, weight in _body(config, count_layers(trained)).state_dict().items()
    }
    shapes = {name: shape for name, shape in shapes.items() if "embed_tokens" not in name}
    shapes["head"] = torch.Size((len(output_ids), config.hidden_size))
    found = {name: weight.shape for name, weight in trained.items() if name != "output_ids"}
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            has, needs = (list(its[name]) if name in its else "none" for its in (found, shapes))
            raise ValueError(f"{name}: {has}, where a draft of this target has {needs}")


def _body(config: PreTrainedConfig, layers: int) -> Any:
    """A model without a head and without memory for weights."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(draft_config(config, layers))
    return getattr(whole, "model", None)


def _rows(output_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[vocab_size]: the row of each token, -1 if it has none."""
    rows = torch.full((vocab_size,), -1, device=output_ids.device)
    rows[output_ids] = torch.arange(len(output_ids), device=output_ids.device)
    return rows


def most_frequent(counts: torch.Tensor, rows: int, always: list[int]) -> torch.Tensor:
    """Ids, ascending, of the `rows` tokens with the largest counts [vocab_size]; `always` are among them."""
    counts = counts.clone()
    counts[always] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:rows].sort().values
