"""Measurements for a plan: costs of passes, answers of the target, and where a draft agrees with them.

One model is loaded at a time, so that no model takes another's memory or time.
"""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import track

from coordinator.prompts.tokenizer import TargetTokenizer
from specpool.client.prompts import PromptLine
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import load_engine
from specpool.engine.startup.step_times import measure_step_times
from specpool.planning.capacity import Memory
from specpool.planning.plan import Model
from specpool.protocol.tokenizer import TokenizerFiles


class PromptError(ValueError):
    """The target cannot answer these prompts; the message says why."""


@dataclass(frozen=True)
class Answer:
    """The tokens that the target writes greedily after a prompt, its end-of-sequence token included."""

    prompt: list[int]
    token_ids: list[int]


def measure_target(
    options: EngineOptions, lines: Sequence[PromptLine], max_tokens: int, rows: Sequence[int], console: Console
) -> tuple[Model, list[Answer]]:
    """Measures passes of the target with these numbers of rows, and its answers. UnsupportedModelError, PromptError."""
    engine = _load(options, exact=True, console=console)  # as it is served
    model = _model(engine, rows)
    prompts = _encoded(engine, lines, max_tokens)
    return model, _written(engine, prompts, max_tokens, console)


def measure_draft(
    options: EngineOptions, target: Model, answers: Sequence[Answer], rows: Sequence[int], console: Console
) -> tuple[Model, list[list[bool]]]:
    """Measures the steps of a draft, and at which tokens of each answer it agrees. UnsupportedModelError."""
    engine = _load(options, exact=False, console=console)
    model = _model(engine, rows)
    if model.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise UnsupportedModelError(f"{model.name} has another tokenizer than {target.name}")
    return model, _agreed(engine, answers, console)


def _load(options: EngineOptions, exact: bool, console: Console) -> Engine:
    gc.collect()  # the model before this one: modules are cycles
    torch.cuda.empty_cache()
    with console.status(f"loading {options.model}"):
        return load_engine(options, exact)


def _model(engine: Engine, rows: Sequence[int]) -> Model:
    info, extents = engine.info(), engine.slots.extents
    return Model(
        name=info.model,
        device=info.device,
        dtype=info.dtype,
        parameters=info.parameters - info.embedding_parameters,
        memory=Memory(
            weights=info.weight_bytes,
            activations=info.activation_bytes,
            kv_per_position=info.kv_bytes_per_token,
            positions=extents.columns,
            multiple=extents.multiple,
            max_model_len=info.max_model_len,
        ),
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        step_seconds=measure_step_times(engine, rows),
        step_cached=info.step_cached,
        seconds_per_cached=info.seconds_per_cached,
        max_rows=info.max_rows,
        revision=getattr(engine.loaded.config, "_commit_hash", None),
    )


def _encoded(engine: Engine, lines: Sequence[PromptLine], max_tokens: int) -> list[list[int]]:
    """Token ids of the prompts, as the coordinator encodes them."""
    tokenizer = TargetTokenizer(TokenizerFiles(**asdict(engine.loaded.tokenizer)))
    prompts = []
    for line in lines:
        if isinstance(line.prompt, str):
            prompts.append(tokenizer.encode_text(line.prompt))
        else:
            prompts.append(tokenizer.encode_chat([(each["role"], each["content"]) for each in line.prompt]))
        if not 0 < len(prompts[-1]) <= engine.max_model_len - max_tokens:
            raise PromptError(
                f"prompt {line.id!r} has {len(prompts[-1])} tokens; with {max_tokens} more, "
                f"from 1 to {engine.max_model_len - max_tokens} are possible"
            )
    return prompts


@torch.inference_mode()
def _written(engine: Engine, prompts: Sequence[list[int]], max_tokens: int, console: Console) -> list[Answer]:
    """Greedy answers to all prompts, in one batch."""
    slots = [engine.slots.take(("plan", i), len(prompt) + max_tokens) for i, prompt in enumerate(prompts)]
    answers = [Answer(prompt, []) for prompt in prompts]
    spans = [Span(slot.index, 0, prompt, 1) for slot, prompt in zip(slots, prompts, strict=True) if slot is not None]
    if len(spans) < len(prompts):
        raise PromptError(f"the KV cache has room for {len(spans)} of {len(prompts)} prompts at a time")
    writing = list(zip(answers, spans, strict=True))
    for _ in track(range(max_tokens), "target writes", console=console, transient=True):
        chosen = _choices(engine, [span for _, span in writing]) if writing else []
        for (answer, _), token in zip(writing, chosen, strict=True):
            answer.token_ids.append(token)
        writing = [
            (answer, Span(span.slot, span.end, answer.token_ids[-1:], 1))
            for answer, span in writing
            if answer.token_ids[-1] not in engine.loaded.tokenizer.eos_token_ids
        ]
    return answers


@torch.inference_mode()
def _agreed(engine: Engine, answers: Sequence[Answer], console: Console) -> list[list[bool]]:
    """Whether the draft chooses each token of each answer too, given all tokens before: one pass per answer."""
    slot = engine.slots.take(("plan", 0))
    assert slot is not None  # there is always room for one
    agreed = []
    for answer in track(answers, f"{engine.loaded.name} reads", console=console, transient=True):
        fed = (answer.prompt + answer.token_ids)[:-1]
        if len(fed) > engine.max_model_len:
            raise UnsupportedModelError(f"an answer ends at {len(fed)} of its {engine.max_model_len} positions")
        chosen = _choices(engine, [Span(slot.index, 0, fed, len(answer.token_ids))])
        agreed.append([ours == theirs for ours, theirs in zip(chosen, answer.token_ids, strict=True)])
    return agreed


def _choices(engine: Engine, spans: Sequence[Span]) -> list[int]:
    """The most probable token at each position that the spans ask for."""
    chosen: list[int] = engine.token_ids(engine.forward(spans).argmax(-1)).tolist()
    return chosen
