"""The draft in training: some of the target's layers and part of its output head."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specpool.distill.examples import Batch
from specpool.engine.config.architectures import RECURRENT_LAYERS
from specpool.engine.models.draft_folder import count_layers, draft_config

FEATURE_LAYERS = "feature_layers"
"""Name of the numbers of the layers whose states a feature draft reads, beside its weights."""


class Step(NamedTuple):
    """A draft step at all positions. The first one predicts the token after each position, as the others do later."""

    normed: torch.Tensor  # [chosen, hidden]: input of the output head
    logits: torch.Tensor  # [chosen, head rows]
    states: torch.Tensor | None = None  # [B, T, hidden]: a feature draft's own states, input of the next step
    expected: torch.Tensor | None = None  # [B, T, hidden]: the target's states that they stand for


class Student(nn.Module):
    """Trainable layers, norm and output head on top of the target's frozen embeddings."""

    output_ids: torch.Tensor
    """[head rows]: token of each row."""
    row_of: torch.Tensor
    """[vocab_size]: head row of each token; -1 without one."""

    def __init__(self, target: PreTrainedModel, layers: list[int], output_ids: torch.Tensor) -> None:
        """Copy these layers of the target, and the rows of its output head for `output_ids`."""
        super().__init__()
        source: Any = target
        config = draft_config(target.config, len(layers))
        config._attn_implementation = "sdpa" if source.model._supports_sdpa else "eager"
        self.body: Any = type(source.model)(config)
        self.body.embed_tokens.weight.data = source.model.embed_tokens.weight.data
        self.body.embed_tokens.weight.requires_grad_(False)
        for layer, index in zip(self.body.layers, layers, strict=True):
            layer.load_state_dict(source.model.layers[index].state_dict())
        self.body.norm.load_state_dict(source.model.norm.state_dict())
        self.head = nn.Parameter(source.get_output_embeddings().weight.data[output_ids].clone())
        self.register_buffer("output_ids", output_ids, persistent=False)
        self.register_buffer("row_of", _rows(output_ids, target.config.vocab_size), persistent=False)

    def unroll(self, batch: Batch, steps: int = 1) -> list["Step"]:
        """Draft `steps` tokens at every position of a batch. The steps of this draft do not differ, so there is one."""
        hidden = self.body(batch.token_ids, attention_mask=batch.attention_mask, use_cache=False).last_hidden_state
        normed = hidden[batch.chosen]
        return [Step(normed, normed @ self.head.T)]

    def trained(self) -> dict[str, torch.Tensor]:
        """Trained weights by name, and `output_ids`."""
        weights = {name: weight for name, weight in self.state_dict().items() if "embed_tokens" not in name}
        return {**weights, "output_ids": self.output_ids.int()}

    def learn(self, trained: dict[str, torch.Tensor]) -> None:
        """Load weights that `trained` returned for a student of the same shape."""
        weights = {name: weight for name, weight in trained.items() if name not in ("output_ids", FEATURE_LAYERS)}
        missing, unexpected = self.load_state_dict(weights, strict=False)
        mismatched = [*unexpected, *(name for name in missing if "embed_tokens" not in name)]
        assert not mismatched, mismatched
        self.output_ids = trained["output_ids"].long().to(self.head.device)
        self.row_of = _rows(self.output_ids, len(self.row_of))


def check_target(config: PreTrainedConfig, layers: list[int]) -> None:
    """ValueError if these layers of the target cannot form a student."""
    body = _body(config, 1)
    if not all(hasattr(body, name) for name in ("layers", "norm", "embed_tokens")):
        raise ValueError(f"model type {config.model_type} does not have the structure of Llama")
    if max(layers) >= config.num_hidden_layers:
        raise ValueError(f"{max(layers)} is not below {config.num_hidden_layers}, the number of the target's layers")
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    if config.model_type in RECURRENT_LAYERS and all(types[layer] != "full_attention" for layer in layers):
        raise ValueError(f"{layers} are all recurrent; a draft needs at least one layer with attention")


def check_weights(trained: dict[str, torch.Tensor], config: PreTrainedConfig) -> None:
    """ValueError if these weights do not fit a student of this target."""
    if not {"head", "output_ids"} <= trained.keys():
        raise ValueError("not a trained draft: head or output_ids is missing")
    output_ids = trained["output_ids"]
    if not 0 <= int(output_ids.min()) <= int(output_ids.max()) < config.vocab_size:
        raise ValueError(f"output_ids: {int(output_ids.max())} is beyond the target's {config.vocab_size} tokens")
    expected = {
        f"body.{name}": weight.shape for name, weight in _body(config, count_layers(trained)).state_dict().items()
    }
    expected = {name: shape for name, shape in expected.items() if "embed_tokens" not in name}
    expected["head"] = torch.Size((len(output_ids), config.hidden_size))
    if FEATURE_LAYERS in trained:
        hidden, layers = config.hidden_size, trained[FEATURE_LAYERS].tolist()
        if max(layers) > config.num_hidden_layers:
            raise ValueError(f"feature_layers: {max(layers)} is beyond the target's {config.num_hidden_layers} layers")
        expected |= {"fc": torch.Size((hidden, 2 * hidden)), "project": torch.Size((hidden, hidden * len(layers)))}
    actual = {name: weight.shape for name, weight in trained.items() if name not in ("output_ids", FEATURE_LAYERS)}
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            shapes = (str(list(shapes[name])) if name in shapes else "none" for shapes in (actual, expected))
            raise ValueError("{}: shape {}, but a draft of this target has {}".format(name, *shapes))


def most_frequent(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Ids of the `rows` tokens with the largest counts [vocab_size], ascending."""
    return counts.argsort(descending=True, stable=True)[:rows].sort().values


def _body(config: PreTrainedConfig, layers: int) -> Any:
    """A model without an output head, on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(draft_config(config, layers))
    return getattr(model, "model", None)


def _rows(output_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[vocab_size]: head row of each token; -1 without one."""
    rows = torch.full((vocab_size,), -1, device=output_ids.device)
    rows[output_ids] = torch.arange(len(output_ids), device=output_ids.device)
    return rows
