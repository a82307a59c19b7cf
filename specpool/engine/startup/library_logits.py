"""Refuses a model if the engine's logits differ from the logits of the library's own attention."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from specpool.engine.cache.spans import Span
from specpool.engine.config.sources import UnsupportedModelError, first_line
from specpool.engine.models.config import rope_variants
from specpool.engine.models.facts import ModelFacts
from specpool.engine.models.loading import LoadedModel
from specpool.engine.passes.attention import PACKED_ATTENTION
from specpool.engine.run.engine import Engine

PROBE_TOKENS = 8
# Maximum tokens of the probes for scaled positions and for windows, by device type.
MAX_PROBE_TOKENS, MAX_WINDOW_PROBE_TOKENS = {"cpu": 512, "cuda": 2048}, {"cpu": 1040, "cuda": 2048}
# Tokens of the second of two passes, which attends to the cache of the first, and how many of its logits to compare.
SECOND_PASS, COMPARED = 5, 4
WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "attention_chunk_size",
    "window_size",
    "local_attention",
)
"""Configuration keys of different families for the distance beyond which some layers do not attend."""


def probe_lengths(config: PreTrainedConfig, facts: ModelFacts) -> tuple[int, ...]:
    """Return probe lengths in tokens: a short one, and one at which a window or scaled positions affect the logits."""
    longest, longest_of_window = (
        min(facts.max_model_len, limits.get(facts.device.type, PROBE_TOKENS))
        for limits in (MAX_PROBE_TOKENS, MAX_WINDOW_PROBE_TOKENS)
    )
    windows = [size for name in WINDOWS if isinstance(size := getattr(config, name, None), int)]
    needed = [min(longest_of_window, size + PROBE_TOKENS) for size in windows if size + COMPARED < longest_of_window]
    # Scaling affects high positions most, so a longer probe reveals more even if it does not reach them all.
    needed += [min(longest, size + PROBE_TOKENS) for size in _scaled_from(config)]
    return tuple(sorted({PROBE_TOKENS, max(needed, default=PROBE_TOKENS)}))


@torch.inference_mode()
def library_logits(loaded: LoadedModel, facts: ModelFacts) -> Mapping[int, torch.Tensor] | None:
    """Logits [COMPARED, rows of the head] of the last tokens by probe length, with the model's own attention.

    None: transformers does not know the model. UnsupportedModelError: the model cannot run.
    """
    if not loaded.modules_run:
        return None
    model = loaded.model
    model.set_attn_implementation("eager")
    expected = {}
    try:
        for count in probe_lengths(loaded.config, facts):
            input_ids = torch.tensor([_probe_tokens(facts.vocab_size, count)], device=facts.device)
            output = model(input_ids=input_ids, use_cache=False, logits_to_keep=COMPARED)
            expected[count] = output.logits[0, -COMPARED:]
    except Exception as error:  # the code of a foreign model may raise anything
        kind = loaded.config.model_type
        raise UnsupportedModelError(f"this {kind} model cannot run: {first_line(error)}") from error
    finally:
        model.set_attn_implementation(PACKED_ATTENTION)
    return expected


@torch.inference_mode()
def refuse_other_logits(engine: Engine, expected: Mapping[int, torch.Tensor] | None) -> None:
    """Raise UnsupportedModelError if a model bypasses the engine's attention, or computes something else with it.

    `expected`: the result of `library_logits`.
    """
    kind = engine.loaded.config.model_type
    for count in expected or (PROBE_TOKENS,):
        if count > engine.max_model_len:  # memory limits the engine to fewer positions
            continue
        try:
            logits = _logits(engine, count)
        except Exception as error:  # the code of a foreign model may raise anything
            raise UnsupportedModelError(f"this {kind} model cannot run packed batches: {first_line(error)}") from error
        # A layer that bypasses the engine's attention caches no keys.
        cached = engine.layout.arena.columns_of(0, 0, PROBE_TOKENS)
        bypassing = [layer for layer, keys in enumerate(engine.layout.arena.keys) if not keys[:, cached].any()]
        if bypassing:
            raise UnsupportedModelError(
                f"layers {bypassing} of this {kind} model have another kind of attention or none"
            )
        if expected is not None:
            differences, largest = (logits - expected[count]).abs().amax(-1), expected[count].abs().max().item()
            # Rounding may change the experts that a row chooses, so only half of a mixture's rows must agree.
            is_mixture = getattr(engine.loaded.config, "num_experts_per_tok", None) is not None
            _compare(kind, count, (differences.median() if is_mixture else differences.max()).item(), largest)


def _logits(engine: Engine, count: int) -> torch.Tensor:
    """Logits [COMPARED, rows of the head] of the last of `count` probe tokens, computed in two passes."""
    tokens, first = _probe_tokens(engine.vocab_size, count), count - SECOND_PASS
    engine.forward([Span(slot=0, start=0, token_ids=tokens[:first], num_logits=0)])
    return engine.forward([Span(slot=0, start=first, token_ids=tokens[first:], num_logits=COMPARED)])


def _compare(kind: str, count: int, difference: float, largest: float) -> None:
    # Rounding errors are far below this threshold in every dtype. A wrong mask, scale or head order is far above it.
    if not difference <= 0.1 * largest:
        raise UnsupportedModelError(
            f"packed batches do not give this {kind} model's own logits: "
            f"they differ by {difference:.3g} of {largest:.3g} after {count} tokens"
        )


def _scaled_from(config: PreTrainedConfig) -> list[int]:
    """Return the original maximum positions of each scaled rotary embedding; 0 if the configuration has none."""
    scaled = [rope for rope in rope_variants(config) if rope.get("rope_type", "default") != "default"]
    return [int(rope.get("original_max_position_embeddings") or 0) for rope in scaled]


def _probe_tokens(vocab_size: int, count: int) -> list[int]:
    """Tokens from the whole vocabulary. The first ids are often untrained control tokens.

    With the first ids, bfloat16 changed the logits of SmolLM2-135M by 94% of the largest; with these, by 2%.
    """
    eighths = [vocab_size * i // PROBE_TOKENS for i in range(PROBE_TOKENS)]
    return [(eighths[i % PROBE_TOKENS] + i // PROBE_TOKENS) % vocab_size for i in range(count)]
