"""The feature draft in training: it reads the target's hidden states, then its own outputs in their place.

As in EAGLE (Li et al. 2024) and Clover (Xiao et al. 2024); unrolled steps as in EAGLE-3 (Li et al. 2025).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from specpool.distill.examples import Batch, Example
from specpool.distill.static_decoder import run_layer
from specpool.distill.student import FEATURE_LAYERS, Step, Student

Keys = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each unrolled step, [B, kv heads, T, head dim]."""
SMALLEST = 1e-6
"""Least median of inputs, so that a constant zero has a unit."""
RIDGE = 1e-3
"""Penalty of the regression, as a share of each input's second moment."""


FAMILIES = {"gemma", "llama", "ministral", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "seed_oss"}
"""Families whose layers `run_layer` can run."""


def check_feature_target(config: PreTrainedConfig) -> None:
    """Raise ValueError if a feature student cannot run the layers of this target."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"feature drafts support {', '.join(sorted(FAMILIES))}, not {config.model_type}; use causal")


class FeatureStudent(Student):
    """A student whose input at a position is the target's state before it and the embedding of its token."""

    project_units: torch.Tensor
    """[width]: units of the columns of `project`; see `set_units`."""
    fc_units: torch.Tensor
    """[2 * hidden]: units of the columns of `fc`."""

    def __init__(
        self, target: PreTrainedModel, layers: list[int], output_ids: torch.Tensor, feature_layers: list[int]
    ) -> None:
        """`feature_layers`: numbers of the target's layers after which to take the states."""
        super().__init__(target, layers, output_ids)
        hidden = target.config.hidden_size
        self.feature_layers = feature_layers
        self.project = nn.Parameter(torch.zeros(hidden, hidden * len(feature_layers)))
        self.fc = nn.Parameter(torch.zeros(hidden, 2 * hidden))
        self.register_buffer("project_units", torch.ones(self.project.shape[1]), persistent=False)
        self.register_buffer("fc_units", torch.ones(2 * hidden), persistent=False)

    def trained(self) -> dict[str, torch.Tensor]:
        """Trained weights by name, with `output_ids` and `feature_layers`."""
        inputs = {"project": self.project * self.project_units, "fc": self.fc * self.fc_units}
        layers = torch.tensor(self.feature_layers, dtype=torch.int32)
        return {
            **super().trained(),
            **{name: weight.detach() for name, weight in inputs.items()},
            FEATURE_LAYERS: layers,
        }

    def learn(self, trained: dict[str, torch.Tensor]) -> None:
        """Load weights that `trained` returned, or those of a causal draft, which this student then equals."""
        hidden = self.fc.shape[0]
        if FEATURE_LAYERS not in trained:
            nothing, own = torch.zeros(hidden, hidden), torch.eye(hidden)
            project = torch.cat([nothing] * (len(self.feature_layers) - 1) + [own], 1)
            trained = {**trained, "project": project, "fc": torch.cat([nothing, own], 1)}
        units = {"project": self.project_units, "fc": self.fc_units}
        inputs = {name: trained[name].to(unit.device) / unit for name, unit in units.items()}
        super().learn({**trained, **inputs})

    @torch.no_grad()
    def set_units(self, examples: Sequence[Example]) -> None:
        """Scale the columns of `project` and `fc` by typical inputs and outputs. The student computes the same.

        Adam moves all weights by equal steps, but the numbers in states are of very different sizes, and up to a
        thousand times those in embeddings.
        """
        trained, last, device = self.trained(), slice(-self.fc.shape[0], None), self.fc.device
        states = torch.cat([example.states[:-1] for example in examples if example.states is not None])
        states = states.to(device).float()
        embedded = self.body.embed_tokens(torch.cat([example.token_ids[1:] for example in examples]).to(device))
        sizes = states.abs().median(0).values.clamp_min(SMALLEST)
        joined = torch.cat([states @ trained["project"].T, embedded], 1) @ trained["fc"].T
        self.project_units = sizes[last].median() / sizes
        self.fc_units[: self.fc.shape[0]] = joined.abs().median().clamp_min(SMALLEST) / sizes[last]
        self.learn(trained)

    def unroll(self, batch: Batch, steps: int = 1) -> list[Step]:
        """Draft `steps` tokens at every position of a batch.

        Step 1 reads the target's states. Step j reads the states of step j - 1, and attends to the positions that it
        would find in the cache when it drafts its j-th token.
        """
        assert batch.states is not None
        embedded = self.body.embed_tokens(batch.token_ids)
        rotary = self.body.rotary_emb(embedded, torch.arange(embedded.shape[1], device=embedded.device)[None])
        states = expected = batch.states @ (self.project * self.project_units).T
        fc = self.fc * self.fc_units
        cached: list[Keys] = [[] for _ in self.body.layers]
        results = []
        for _ in range(steps):
            hidden = torch.cat([pad(states, (0, 0, 1, 0))[:, :-1], embedded], -1) @ fc.T
            for layer, keys in zip(self.body.layers, cached, strict=True):
                hidden = run_layer(layer, hidden, rotary, partial(_attend, keys, layer.self_attn.scaling))
            normed = self.body.norm(hidden[batch.chosen])
            results.append(Step(normed, normed @ self.head.T, hidden, expected.detach()))
            states = hidden
        return results

    @torch.inference_mode()
    def fit_input(self, target: PreTrainedModel, first_layer: int, examples: Sequence[Example]) -> None:
        """Set `fc` and `project` by ridge regression: together, they predict the input of this layer of the target.

        The draft starts close to the target's last layers then, which is most of what it ever learns in a short time.
        """
        body: Any = target.model
        inputs: list[torch.Tensor] = []
        hook = body.layers[first_layer].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        size, hidden = self.project.shape[1] + target.config.hidden_size, target.config.hidden_size
        device = target.device
        moments, products = (torch.zeros(size, columns, device=device).double() for columns in (size, hidden))
        for example in examples:
            tokens = example.token_ids[None].to(device)
            body(tokens, use_cache=False)
            assert example.states is not None
            states = example.states[:-1].to(device).float()
            known = torch.cat([states, body.embed_tokens(tokens)[0, 1:]], -1).double()
            moments += known.T @ known
            products += known.T @ inputs.pop()[0, 1:].double()
        hook.remove()
        ridge = RIDGE * moments.diag() + 1e-6 * moments.diag().mean()
        weights = torch.linalg.solve(moments + ridge.diag(), products).T.float()
        # The last layer's state passes through `project` as it is, so that an own state can take its place.
        self.project[:, -hidden:] = torch.eye(hidden)
        self.fc.copy_(weights[:, -2 * hidden :])


def _attend(keys: Keys, scaling: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend from a new step [B, heads, T, head dim], and append its keys and values to those of the steps before.

    Position t of step j sees the positions up to t - j + 1 of step 1, then one position of each later step, up to t.
    """
    keys.append((key, value))
    groups, steps, length = query.shape[1] // keys[0][0].shape[1], len(keys), query.shape[2]
    expanded = [tuple(each.repeat_interleave(groups, 1) for each in pair) for pair in keys]
    (first_keys, first_values), later = expanded[0], expanded[1:]
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril(1 - steps)
    scores = (query @ first_keys.transpose(-1, -2) * scaling).float()
    scores = scores.masked_fill(~visible, float("-inf"))
    # `later[i]` is step i + 2, seen at position t - (steps - 2 - i).
    shifted = [[_delayed(each, steps - 2 - i) for each in pair] for i, pair in enumerate(later)]
    own = [((query * other).sum(-1, keepdim=True) * scaling).float() for other, _ in shifted]
    weights = torch.cat([scores, *own], -1).softmax(-1).to(query.dtype)
    out = weights[..., :length] @ first_values
    for i, (_, value) in enumerate(shifted):
        out = out + weights[..., length + i, None] * value
    return out


def _delayed(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Rows [B, heads, T, head dim], moved to later positions."""
    return pad(rows, (0, 0, by, 0))[:, :, : rows.shape[2]] if by else rows
