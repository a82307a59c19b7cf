"""Agreement of a draft with its target, by kind of prompt: `python -m specpool.distill.evaluate --prompts FILE`.

The target answers greedily. Then the draft reads each answer in one pass and predicts every token. A line of the file
is a text, {"prompt"}, a chat, {"messages"}, or a Spec-Bench question, {"turns"}, of which only the first turn is used.
A line can have a "category". The last line of the output is JSON.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from pydantic import Field
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specpool.distill.examples import Example
from specpool.distill.predictions import predict_answer, target_states
from specpool.distill.questions import ChatTemplate, Questions
from specpool.distill.replay import REPORTED_K, Agreed, agreement_rate, mean_acceptance_length
from specpool.distill.writer import Writer
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config import load_config
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.models.tokenizer import load_tokenizer
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import load_engine
from specpool.rpc.config.settings import LogLevel, Settings, naming
from specpool.rpc.observability.logs import configure_logging

console = Console(stderr=True)

PROGRAM = "python -m specpool.distill.evaluate"
MAX_POSITIONS = 2048
"""Default positions of a dialogue, if the target has as many."""
ALL = "all"
Chat = list[dict[str, str]]
Prompts = dict[str, list[str | Chat]]
"""Texts and chats by category; ALL: without one."""


class EvaluateSettings(Settings):
    """Measure how often a draft predicts its target's tokens, and the resulting acceptance lengths."""

    prompts: Path = Field(description="JSONL file of prompts, chats or Spec-Bench questions, perhaps with a category")
    model: str | None = Field(None, description="folder of the draft; default: the embedded one")
    target: str | None = Field(None, description="folder of the target; default: the embedded one")
    max_sequences: int = Field(16, ge=1, description="answers generated at a time")
    max_model_len: int | None = Field(
        None,
        ge=512,
        description="positions of a dialogue; longer prompts are skipped; default: 2,048, or the target's",
    )
    device: str = Field("cpu", description="device of target and draft")
    log_level: LogLevel = Field("warning", description="minimum level of logged messages")


def main(arguments: list[str] | None = None) -> None:
    settings = EvaluateSettings.load(PROGRAM, arguments)
    configure_logging(settings.log_level)
    with naming(PROGRAM, "prompts", OSError, ValueError):
        prompts = read_prompts(settings.prompts)
    with naming(PROGRAM, "target", OSError):
        target = settings.target or str(embedded_pair().target)
        model = settings.model or str(embedded_pair().draft)
    result = evaluate(settings, prompts, target, model)
    table = Table(*(name.replace("_", " ") for name in result["categories"][0]))
    for row in result["categories"]:
        table.add_row(*map(str, row.values()))
    console.print(table)
    print(json.dumps(result))


def evaluate(settings: EvaluateSettings, prompts: Prompts, target: str, model: str) -> dict[str, Any]:
    """Return results for each category, followed by all prompts together."""
    with naming(PROGRAM, "target", OSError, ValueError, UnsupportedModelError):
        length = settings.max_model_len or positions_of(target)
        engine = _load(settings, length, target)
        tokenizer = load_tokenizer(target)
        template = ChatTemplate.of(tokenizer, frozenset(engine.loaded.tokenizer.eos_token_ids))
    with naming(PROGRAM, "model", OSError, ValueError, UnsupportedModelError):
        draft = _load(settings, length, model, target)
        if draft.loaded.features is not None and not engine.has_states:
            raise ValueError(f"{model} reads hidden states, which the target {target} does not return")
        if draft.loaded.tokenizer.fingerprint != engine.loaded.tokenizer.fingerprint:
            raise ValueError(f"{model} uses a different tokenizer than the target {target}")
    questions = Questions(template, seed=0)
    writer, limit = Writer(engine, questions), length - questions.limits.max_answer
    with naming(PROGRAM, "prompts", TemplateError, ValueError):
        tokens = {category: [_tokens(prompt, template) for prompt in group] for category, group in prompts.items()}
        fitting = {category: [each for each in group if len(each) <= limit] for category, group in tokens.items()}
        if not any(fitting.values()):
            answer = questions.limits.max_answer
            raise ValueError(f"none has at most {limit} tokens, which leaves {answer} of {length} positions")
    agreed: dict[str, list[Sequence[Sequence[bool]]]] = {}
    for category, group in fitting.items():
        if group:
            answers = track(writer.answer(group), category, total=len(group), console=console, transient=True)
            agreed[category] = [_agreement(draft, example, engine) for example in list(answers)]
    every = [answer for answers in agreed.values() for answer in answers]
    agreed.pop(ALL, None)
    rows = [{"category": category, **_summary(answers)} for category, answers in {**agreed, ALL: every}.items()]
    left_out = sum(map(len, prompts.values())) - len(every)
    return {"model": model, "target": target, "left_out": left_out, "categories": rows}


def positions_of(target: str) -> int:
    """Positions of a dialogue with this target."""
    positions = getattr(load_config(EngineOptions(model=target)), "max_position_embeddings", None)
    return min(MAX_POSITIONS, positions or MAX_POSITIONS)


def _load(settings: EvaluateSettings, length: int, model: str, target: str | None = None) -> Engine:
    """Load the target, or a draft of `target`."""
    sizes = {"max_sequences": settings.max_sequences, "max_model_len": length}
    options = EngineOptions(model=model, target_model=target, device=settings.device, **sizes)
    return load_engine(options, exact=False)


def read_prompts(path: Path) -> Prompts:
    """Prompts of a file by category. OSError; ValueError names an invalid line."""
    prompts = defaultdict(list)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                category, prompt = _prompt(json.loads(line))
            except (ValueError, TypeError, LookupError) as error:
                raise ValueError(
                    f"line {number} is neither a prompt, a chat nor a Spec-Bench question: {error}"
                ) from None
            prompts[category].append(prompt)
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def _prompt(record: Any) -> tuple[str, str | Chat]:
    if not isinstance(record, dict):
        raise TypeError("not an object")
    category = record.get("category", ALL)
    if "prompt" in record:
        prompt, texts = record["prompt"], [record["prompt"]]
    else:
        prompt = record["messages"] if "messages" in record else [{"role": "user", "content": record["turns"][0]}]
        texts = [message[name] for message in prompt for name in ("role", "content")]
    if not texts or not all(isinstance(text, str) for text in (category, *texts)):
        raise TypeError("prompt, category, role and content must be strings")
    return category, prompt


def _tokens(prompt: str | Chat, template: ChatTemplate) -> list[int]:
    """All tokens before the answer. A text is encoded with the special tokens that the tokenizer adds."""
    if isinstance(prompt, str):
        return list(template.tokenizer.encode(prompt))
    return template.encode(template.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def _agreement(draft: Engine, example: Example, target: Engine) -> Sequence[Sequence[bool]]:
    """Whether the draft predicts the target's token at each position of an answer, by draft step."""
    tokens, features = example.token_ids.tolist(), draft.loaded.features
    states = None if features is None else target_states(target, tokens, features.layers)
    return predict_answer(draft, tokens, example.answer_start, states).agreed


def _summary(answers: Sequence[Sequence[Sequence[bool]]]) -> dict[str, float]:
    """Numbers of answers and tokens, agreement, and mean acceptance lengths by k. `answers`: each by draft step."""
    agreed: Agreed = [*zip(*answers, strict=True)]
    lengths = {f"k={k}": round(mean_acceptance_length(agreed, k), 2) for k in REPORTED_K}
    tokens, rate = sum(map(len, agreed[0])), round(agreement_rate(agreed[0]), 3)
    return {"answers": len(answers), "tokens": tokens, "agreement": rate, **lengths}


if __name__ == "__main__":
    main()
