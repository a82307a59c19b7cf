"""Generates the target's answers for a plan, and measures how much of them a draft predicts."""

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field

import torch

from coordinator.prompts.chat_reader import read_chat
from coordinator.prompts.tokenizer import TargetTokenizer
from specpool.client import make_request
from specpool.client.prompts import PromptLine
from specpool.distill.predictions import predict_answer, target_states
from specpool.engine.cache.spans import Span
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.run.engine import Engine
from specpool.planning.progress import Phases
from specpool.planning.replaying import Recording
from specpool.protocol.tokenizer import TokenizerFiles

# Minimum to measure, even if that exceeds the time limit.
MIN_TOKENS, MIN_ANSWERS = 8, 4


class PromptError(ValueError):
    """The target cannot answer a prompt; the message says why."""


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's greedy answer, including the end-of-sequence token."""

    prompt: list[int]
    token_ids: list[int]
    states: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """The target's hidden states of all tokens, by the layers that a feature draft reads."""


def encode_prompts(engine: Engine, lines: Sequence[PromptLine], max_tokens: int) -> list[list[int]]:
    """Encode prompts as the coordinator does."""
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
def write_answers(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, seconds: float, phases: Phases
) -> list[Answer]:
    """Answer all prompts greedily in one batch. After `seconds`, answers stop once they have MIN_TOKENS."""
    slots = [engine.slots.take(("plan", i), len(prompt) + max_tokens) for i, prompt in enumerate(prompts)]
    answers = [Answer(prompt, []) for prompt in prompts]
    spans = [Span(slot.index, 0, prompt, 1) for slot, prompt in zip(slots, prompts, strict=True) if slot is not None]
    if len(spans) < len(prompts):
        raise PromptError(f"the KV cache can hold {len(spans)} of {len(prompts)} prompts at a time")
    unfinished, deadline = list(zip(answers, spans, strict=True)), time.monotonic() + seconds
    with phases.phase(f"answering {len(prompts)} prompts", max_tokens) as report:
        for count in range(max_tokens):
            if not unfinished or (count >= MIN_TOKENS and time.monotonic() > deadline):
                break
            report(f"{count} tokens")
            chosen = _choices(engine, [span for _, span in unfinished])
            for (answer, _), token in zip(unfinished, chosen, strict=True):
                answer.token_ids.append(token)
            unfinished = [
                (answer, Span(span.slot, span.end, answer.token_ids[-1:], 1))
                for answer, span in unfinished
                if answer.token_ids[-1] not in engine.loaded.tokenizer.eos_token_ids
            ]
    return answers


@torch.inference_mode()
def add_states(engine: Engine, answers: Sequence[Answer], layers: Collection[tuple[int, ...]]) -> None:
    """Compute the target's hidden states after the numbers of layers of each draft. UnsupportedModelError."""
    if layers and not engine.has_states:
        raise UnsupportedModelError("it does not return hidden states, which a draft reads")
    for each in layers:
        if max(each) > engine.facts.layers:
            raise UnsupportedModelError(f"a draft reads the states after layer {max(each)} of {engine.facts.layers}")
        for answer in answers:
            answer.states[each] = target_states(engine, answer.prompt + answer.token_ids, each)


def record_predictions(engine: Engine, answers: Sequence[Answer], seconds: float, phases: Phases) -> list[Recording]:
    """Return the answers with the draft's prediction of each token from the tokens before it.

    After `seconds`, it stops once MIN_ANSWERS answers are checked.
    """
    recordings: list[Recording] = []
    deadline = time.monotonic() + seconds
    with phases.phase("comparing its predictions with the answers", len(answers)) as report:
        for answer in answers:
            if len(recordings) >= MIN_ANSWERS and time.monotonic() > deadline:
                break
            report(f"{len(recordings)} answers")
            tokens, features = answer.prompt + answer.token_ids, engine.loaded.features
            if len(tokens) - 1 > engine.max_model_len:
                raise UnsupportedModelError(
                    f"an answer has {len(tokens) - 1} tokens, more than the draft's {engine.max_model_len} positions"
                )
            states = None if features is None else answer.states[features.layers]
            if features is not None and states is not None and states.shape[1] != features.width:
                raise UnsupportedModelError(
                    f"reads states of {features.width} numbers; the target's have {states.shape[1]}"
                )
            prediction = predict_answer(engine, tokens, len(answer.prompt), states)
            recordings.append(Recording(answer.prompt, answer.token_ids, prediction))
    return recordings


def _choices(engine: Engine, spans: Sequence[Span]) -> list[int]:
    """Return the most probable token at each requested position."""
    chosen: list[int] = engine.head.token_ids(engine.forward(spans).argmax(-1)).tolist()
    return chosen
