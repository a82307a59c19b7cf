"""Random feature drafts for tiny targets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_kernels import run_by_kernels
from tiny_models import load_engine, random_tokens, save_model, small_config
from transformers import AutoModelForCausalLM

from draft_worker.proposer import Proposer
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.config import load_config
from specpool.engine.models.draft_folder import draft_config, save_draft
from specpool.engine.models.draft_weights import load_compact, save_compact
from specpool.engine.passes.gpu.model import GpuModel, try_kernels
from specpool.engine.run import pass_selection
from specpool.engine.weights.quantized import Weight
from specpool.protocol.rounds import ProposeItem, ProposeRound

HEAD_TOKENS = (*range(3, 90), 120, 100, 110, 200)


def random_trained(
    target: Path, layers: int = 1, feature_layers: tuple[int, ...] = (1, 2), *, project: bool = True
) -> dict[str, Weight]:
    """Random weights of a feature draft, as a trainer makes them."""
    config = draft_config(load_config(EngineOptions(model=str(target))), layers)
    torch.manual_seed(1)
    body = AutoModelForCausalLM.from_config(config).model.state_dict()
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"body.{name}": weight.shape for name, weight in body.items()}
    shapes |= {"head": (len(HEAD_TOKENS), hidden), "fc": (hidden, 2 * hidden)}
    if project:
        shapes["project"] = (hidden, hidden * len(feature_layers))
    trained: dict[str, Weight] = {
        name: torch.randn(shape) * 0.15 if len(shape) > 1 else 1 + torch.randn(shape) * 0.1
        for name, shape in shapes.items()
        if "embed_tokens" not in name
    }
    return {
        **trained,
        "output_ids": torch.tensor(HEAD_TOKENS, dtype=torch.int32),
        "feature_layers": torch.tensor(feature_layers, dtype=torch.int32),
    }


def compacted(trained: Mapping[str, Weight], folder: Path) -> dict[str, Weight]:
    """The weights as they are shipped, with quantized matrices."""
    save_compact(folder / "trained.safetensors", trained)
    return load_compact(folder / "trained.safetensors")


def save_feature_draft(
    folder: Path, architecture: str = "llama", layers: int = 1, feature_layers: tuple[int, ...] = (1, 2),
    *, project: bool = True, quantized: bool = True,
) -> Path:  # fmt: skip
    """Save a random feature draft for a tiny target, which is saved beside it. Return the draft's folder."""
    target, draft = folder / "target", folder / "draft"
    save_model(target, small_config(architecture, num_hidden_layers=3))
    trained = random_trained(target, layers, feature_layers, project=project)
    save_draft(draft, str(target), compacted(trained, folder) if quantized else trained)
    return draft


def random_states(count: int, width: int, seed: float) -> torch.Tensor:
    """Random states [count, width] of a target, as they are after the wire."""
    generator = torch.Generator().manual_seed(int(seed * 2**32))
    return torch.randn(count, width, generator=generator).bfloat16().float()


def encoded_states(states: torch.Tensor) -> bytes:
    """States as they are on the wire."""
    return states.bfloat16().view(torch.uint8).numpy().tobytes()


def save_pair_draft(folder: Path, target: Path, draft: Path, feature_layers: tuple[int, ...]) -> Path:
    """Save a feature draft that is often right, because states have little influence on the layers of `draft`."""
    model: Any = AutoModelForCausalLM.from_pretrained(draft)
    hidden = model.config.hidden_size
    torch.manual_seed(1)
    trained: dict[str, Weight] = {
        **{f"body.{name}": weight for name, weight in model.model.state_dict().items() if "embed_tokens" not in name},
        "head": model.get_output_embeddings().weight.data,
        "output_ids": torch.arange(model.config.vocab_size, dtype=torch.int32),
        "fc": torch.cat([torch.randn(hidden, hidden) * 0.002, torch.eye(hidden)], 1),
        "project": torch.randn(hidden, hidden * len(feature_layers)) * 0.05,
        "feature_layers": torch.tensor(feature_layers, dtype=torch.int32),
    }
    save_draft(folder, str(target), trained)
    return folder


def check_kernels(patch: pytest.MonkeyPatch, draft: Path, target: Path) -> None:
    """Check that the GPU kernels give the logits, own states and draft tokens of the fused pass."""
    pytest.importorskip("triton")
    options: dict[str, Any] = {
        "exact": False, "target_model": str(target), "max_sequences": 3, "max_model_len": 32, "native": False,
    }  # fmt: skip
    fused, tokens = load_engine(draft, **options), random_tokens(12)
    assert fused.loaded.features is not None
    given = random_states(12, fused.loaded.features.width, 0.4)
    spans = [Span(2, 0, tokens, 12, states=given), Span(0, 0, tokens[:3], 1)]
    item = ProposeItem(1, 0, tuple(tokens), num_draft_tokens=4, features=encoded_states(given))
    expected, own_states = fused.forward(spans), fused.own_states
    ((proposal,),) = Proposer(fused).propose([ProposeRound("c", 1, [item])])
    run_by_kernels(patch)
    patch.setattr(pass_selection, "why_no_kernels", try_kernels)  # raises if they cannot run
    engine = load_engine(draft, cuda_graphs=False, **options)
    assert isinstance(engine.forward_pass, GpuModel)
    torch.testing.assert_close(engine.forward(spans), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(engine.own_states, own_states, atol=2e-5, rtol=1e-4)
    ((actual,),) = Proposer(engine).propose([ProposeRound("c", 1, [item])])
    assert actual.draft_token_ids == proposal.draft_token_ids
