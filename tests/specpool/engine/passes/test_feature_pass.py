"""Passes of feature drafts: the formula of the input, batch invariance, and the drafts' own states."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_drafts import random_states, save_feature_draft
from tiny_models import load_engine, random_tokens

from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import load_model
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native.model import NativeModel

WIDTH, LENGTH = 128, 30
PASSES: dict[str, dict[str, Any]] = {
    "quantized": {"activations": "float32"},
    "float32": {"weights": "float32"},
    "torch": {"native": False},
}


class Reference:
    """The layers of transformers, with the input of a feature draft."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_model(EngineOptions(model=str(folder), native=False)).model
        self.model.set_attn_implementation("eager")
        self.input = self.model.model.embed_tokens
        self.norm, self.model.model.norm = self.model.model.norm, torch.nn.Identity()

    def project(self, states: torch.Tensor) -> torch.Tensor:
        return states if self.input.project is None else states @ self.input.project.weight.T

    @torch.inference_mode()
    def __call__(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and own states after each token. `states`: projected, [tokens, hidden]."""
        joined = torch.cat([states, self.input.embedding.weight[tokens]], -1) @ self.input.fc.weight.T
        own = self.model.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        return self.model.lm_head(self.norm(own)), own


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_feature_draft(tmp_path_factory.mktemp(request.param), request.param, layers=2)


@pytest.mark.parametrize("options", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("count", [0, 7, LENGTH])
def test_passes_follow_the_formula(folder: Path, options: dict[str, Any], count: int) -> None:
    """With states of the target before the last `count` tokens, and zeros before the others."""
    engine, reference, tokens = load_engine(folder, **options), Reference(folder), random_tokens(LENGTH)
    assert type(engine.forward_pass) is (FusedModel if "native" in options else NativeModel)
    given = random_states(count, WIDTH, 0.5)
    states = torch.cat([torch.zeros(LENGTH - count, 64), reference.project(given)])
    logits, own = reference(tokens, states)
    actual = engine.forward([Span(0, 0, tokens, LENGTH, states=given)])
    torch.testing.assert_close(actual, logits, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(engine.own_states, own, atol=1e-3, rtol=1e-3)
    # The draft's own state continues it.
    next_logits, _ = reference([*tokens, 5], torch.cat([states, own[-1:]]))
    engine.forward([Span(0, 0, tokens, 1, states=given)])
    assert engine.own_states is not None
    (previous,) = engine.own_states
    (actual,) = engine.forward([Span(0, LENGTH, [5], 1, own_states={0: previous})])
    torch.testing.assert_close(actual, next_logits[-1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"activations": "float32"}], ids=["int8", "float32"])
def test_rows_do_not_depend_on_their_batch(folder: Path, options: dict[str, Any]) -> None:
    """The same bits in one pass, in several passes and token by token, beside other sequences."""
    engine = load_engine(folder, **options)
    sequences = [(random_tokens(n, seed=n), random_states(n, WIDTH, n / 100)) for n in (1, 7, 19, 40)]
    alone = []
    for tokens, states in sequences:
        rows = [engine.forward([Span(0, i, [tokens[i]], 1, states=states[i : i + 1])]) for i in range(len(tokens))]
        alone.append(torch.cat(rows))
    for limit in (512, 11, 3):
        engine.max_num_batched_tokens = limit
        spans = [Span(slot, 0, t, len(t), states=s) for slot, (t, s) in enumerate(sequences)]
        random.Random(limit).shuffle(spans)
        together = engine.forward(spans).split([len(span.token_ids) for span in spans])
        assert all(torch.equal(rows, alone[span.slot]) for rows, span in zip(together, spans, strict=True))


def test_pieces_of_a_span_keep_their_logits_and_states() -> None:
    states, own = torch.arange(6.0).view(3, 2), dict.fromkeys((0, 2, 3, 7), torch.ones(2))
    span = Span(2, 10, [*range(8)], 4, states=states, own_states=own)
    pieces = [span.piece(0, 3), span.piece(3, 3), span.piece(6, 3)]
    assert [(piece.start, [*piece.token_ids], piece.num_logits) for piece in pieces] == [
        (10, [0, 1, 2], 0), (13, [3, 4, 5], 2), (16, [6, 7], 2),
    ]  # fmt: skip
    assert [piece.states.tolist() for piece in pieces if piece.states is not None] == [[], [[0, 1]], [[2, 3], [4, 5]]]
    assert [[*(piece.own_states or {})] for piece in pieces] == [[0, 2], [0], [1]]
