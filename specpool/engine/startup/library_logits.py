"""Refuses a model if the engine's logits differ from the logits of the library's own attention."""

import torch

from specpool.engine.cache.spans import Span
from specpool.engine.config.sources import UnsupportedModelError, first_line
from specpool.engine.models.facts import ModelFacts
from specpool.engine.models.loading import LoadedModel
from specpool.engine.passes.attention import PACKED_ATTENTION
from specpool.engine.run.engine import Engine

PROBE_TOKENS = 8
# Tokens of the first of two passes; the second pass takes the rest.
FIRST_PASS = 3
COMPARED = 4


@torch.inference_mode()
def library_logits(loaded: LoadedModel, facts: ModelFacts) -> torch.Tensor | None:
    """Logits [COMPARED, rows of the head] of the last probe tokens, with the model's own attention.

    None: transformers does not know the model. UnsupportedModelError: the model cannot run.
    """
    if not loaded.modules_run:
        return None
    model = loaded.model
    model.set_attn_implementation("eager")
    try:
        input_ids = torch.tensor([_probe_tokens(facts.vocab_size)], device=facts.device)
        output = model(input_ids=input_ids, use_cache=False)
    except Exception as error:  # the code of a foreign model may raise anything
        kind = loaded.config.model_type
        raise UnsupportedModelError(f"this {kind} model cannot run: {first_line(error)}") from error
    finally:
        model.set_attn_implementation(PACKED_ATTENTION)
    logits: torch.Tensor = output.logits[0, -COMPARED:]
    return logits


@torch.inference_mode()
def refuse_other_logits(engine: Engine, expected: torch.Tensor | None) -> None:
    """Raise UnsupportedModelError if a model bypasses the engine's attention, or computes something else with it.

    `expected`: the result of `library_logits`.
    """
    kind, tokens = engine.loaded.config.model_type, _probe_tokens(engine.vocab_size)
    try:
        # Two passes, so the second one depends on the cache.
        engine.forward([Span(slot=0, start=0, token_ids=tokens[:FIRST_PASS], num_logits=0)])
        logits = engine.forward([Span(slot=0, start=FIRST_PASS, token_ids=tokens[FIRST_PASS:], num_logits=COMPARED)])
    except Exception as error:  # the code of a foreign model may raise anything
        raise UnsupportedModelError(f"this {kind} model cannot run packed batches: {first_line(error)}") from error
    # A layer that bypasses the engine's attention caches no keys.
    cached = slice(0, PROBE_TOKENS)
    bypassing = [layer for layer, keys in enumerate(engine.layout.arena.keys) if not keys[:, cached].any()]
    if bypassing:
        raise UnsupportedModelError(f"layers {bypassing} of this {kind} model have another kind of attention or none")
    if expected is None:
        return
    # Rounding errors are far below this threshold in every dtype. A wrong mask, scale or head order is far above it.
    difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= 0.1 * largest:
        raise UnsupportedModelError(
            f"packed batches do not give this {kind} model's own logits: "
            f"they differ by {difference:.3g} of {largest:.3g}"
        )


def _probe_tokens(vocab_size: int) -> list[int]:
    """Tokens from the whole vocabulary. The first ids are often untrained control tokens.

    With the first ids, bfloat16 changed the logits of SmolLM2-135M by 94% of the largest; with these, by 2%.
    """
    return [vocab_size * i // PROBE_TOKENS for i in range(PROBE_TOKENS)]
