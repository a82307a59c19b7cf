"""Measurements for a plan: costs of passes, the target's answers, and each draft's agreement with them.

Load one model at a time, so that models do not compete for memory or cores.
"""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import track
from transformers.utils.logging import disable_progress_bar

from coordinator.prompts.chat_reader import read_chat
from coordinator.prompts.templates import ChatTemplateError
from coordinator.prompts.tokenizer import EncodingError, TargetTokenizer, TokenizerError
from specpool.client import make_request
from specpool.client.prompts import PromptLine, own_prompts, read_prompt_file
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config import load_config
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import load_engine
from specpool.engine.startup.step_times import measure_step_times
from specpool.planning.prediction import Acceptance, Memory, Model, replay_acceptance
from specpool.planning.settings import PROGRAM, PlanSettings
from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.rpc.config.settings import naming

# Passes with more rows are extrapolated instead of measured.
MAX_ROWS = 512


class PromptError(ValueError):
    """The target cannot answer a prompt; the message says why."""


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's greedy answer, including the end-of-sequence token."""

    prompt: list[int]
    token_ids: list[int]


def measure_pair(settings: PlanSettings, console: Console) -> tuple[Model, list[tuple[Model, Acceptance]]]:
    """Measure the target, then each draft with its acceptance. An invalid setting exits with one line that names it."""
    disable_progress_bar()
    target, drafts = options_of(settings)
    with naming(PROGRAM, "prompts", OSError, ValueError):
        lines = own_prompts() if settings.prompts is None else read_prompt_file(settings.prompts)
        if not lines:
            raise ValueError(f"{settings.prompts} has no prompts")
    with naming(PROGRAM, "target", UnsupportedModelError):
        load_config(target)
    for draft in drafts:  # before measuring the target for minutes
        with naming(PROGRAM, "draft", UnsupportedModelError):
            load_config(draft)
    max_batch, max_k = max(settings.batches), settings.max_num_speculative_tokens
    with (
        naming(PROGRAM, "target", UnsupportedModelError, TokenizerError, OSError),
        naming(PROGRAM, "prompts", PromptError, ChatTemplateError, EncodingError, InvalidArgumentError),
    ):
        rows = powers_of_two(max_batch * (max_k + 1))
        model, answers = _measure_target(target, lines[: settings.num_prompts], settings.max_tokens, rows, console)
    results = []
    for draft in drafts:
        with naming(PROGRAM, "draft", UnsupportedModelError, OSError):
            draft_model, agreed = _measure_draft(draft, model, answers, powers_of_two(max_batch), console)
        results.append((draft_model, replay_acceptance(agreed, max_k)))
    return model, results


def options_of(settings: PlanSettings) -> tuple[EngineOptions, list[EngineOptions]]:
    """Engine options of the target, and of each draft."""
    target, drafts = settings.target, settings.draft or []
    if target is None:
        with naming(PROGRAM, "target", OSError):
            pair = embedded_pair()
        target, drafts = str(pair.target), drafts or [str(pair.draft)]
    options = EngineOptions(
        model=target,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        max_model_len=settings.max_model_len,
        max_sequences=max(*settings.batches, settings.num_prompts),
    )
    changes = {"device": settings.draft_device, "dtype": settings.draft_dtype}
    return options, [options.model_copy(update={**changes, "model": draft}) for draft in drafts]


def powers_of_two(maximum: int) -> list[int]:
    """Row counts to measure: at least two, and the last at least `maximum` or MAX_ROWS."""
    return [2**power for power in range(max(1, (min(maximum, MAX_ROWS) - 1).bit_length()) + 1)]


def _measure_target(
    options: EngineOptions, lines: Sequence[PromptLine], max_tokens: int, rows: Sequence[int], console: Console
) -> tuple[Model, list[Answer]]:
    engine = _load(options, exact=True, console=console)  # with the settings used for serving
    model = _model(engine, rows)
    prompts = _encode(engine, lines, max_tokens)
    return model, _write_answers(engine, prompts, max_tokens, console)


def _measure_draft(
    options: EngineOptions, target: Model, answers: Sequence[Answer], rows: Sequence[int], console: Console
) -> tuple[Model, list[list[bool]]]:
    engine = _load(options, exact=False, console=console)
    model = _model(engine, rows)
    if model.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise UnsupportedModelError(f"{model.name} has another tokenizer than {target.name}")
    return model, _agreement(engine, answers, console)


def _load(options: EngineOptions, exact: bool, console: Console) -> Engine:
    gc.collect()  # modules of the previous model are in reference cycles
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


def _encode(engine: Engine, lines: Sequence[PromptLine], max_tokens: int) -> list[list[int]]:
    """Token ids of the prompts, encoded as the coordinator does."""
    tokenizer = TargetTokenizer(TokenizerFiles(**asdict(engine.loaded.tokenizer)))
    limit = engine.max_model_len - max_tokens
    prompts = []
    for line in lines:
        if isinstance(line.prompt, str):
            tokens = tokenizer.encode_text(line.prompt)
        else:
            tokens = tokenizer.encode_chat(read_chat(make_request(line.prompt, **line.options).chat))
        if not 0 < len(tokens) <= limit:
            raise PromptError(
                f"prompt {line.id!r} has {len(tokens)} tokens; the limit is {limit}, with {max_tokens} more to generate"
            )
        prompts.append(tokens)
    return prompts


@torch.inference_mode()
def _write_answers(engine: Engine, prompts: Sequence[list[int]], max_tokens: int, console: Console) -> list[Answer]:
    """Greedy answers to all prompts, in one batch."""
    slots = [engine.slots.take(("plan", i), len(prompt) + max_tokens) for i, prompt in enumerate(prompts)]
    answers = [Answer(prompt, []) for prompt in prompts]
    spans = [Span(slot.index, 0, prompt, 1) for slot, prompt in zip(slots, prompts, strict=True) if slot is not None]
    if len(spans) < len(prompts):
        raise PromptError(f"the KV cache can hold {len(spans)} of {len(prompts)} prompts at a time")
    unfinished = list(zip(answers, spans, strict=True))
    for _ in track(range(max_tokens), "generating answers", console=console, transient=True):
        chosen = _choices(engine, [span for _, span in unfinished]) if unfinished else []
        for (answer, _), token in zip(unfinished, chosen, strict=True):
            answer.token_ids.append(token)
        unfinished = [
            (answer, Span(span.slot, span.end, answer.token_ids[-1:], 1))
            for answer, span in unfinished
            if answer.token_ids[-1] not in engine.loaded.tokenizer.eos_token_ids
        ]
    return answers


@torch.inference_mode()
def _agreement(engine: Engine, answers: Sequence[Answer], console: Console) -> list[list[bool]]:
    """Whether the draft predicts each token of each answer, given all tokens before it. One pass per answer."""
    slot = engine.slots.take(("plan", 0))
    assert slot is not None  # there is always space for one
    agreed = []
    for answer in track(answers, f"checking {engine.loaded.name}", console=console, transient=True):
        context = (answer.prompt + answer.token_ids)[:-1]
        if len(context) > engine.max_model_len:
            raise UnsupportedModelError(
                f"an answer has {len(context)} tokens, more than the draft's {engine.max_model_len} positions"
            )
        chosen = _choices(engine, [Span(slot.index, 0, context, len(answer.token_ids))])
        agreed.append([draft == target for draft, target in zip(chosen, answer.token_ids, strict=True)])
    return agreed


def _choices(engine: Engine, spans: Sequence[Span]) -> list[int]:
    """The most probable token at each requested position."""
    chosen: list[int] = engine.token_ids(engine.forward(spans).argmax(-1)).tolist()
    return chosen
