"""Agreement of a draft with its target, by kind of prompt: `python -m specpool.distill.evaluate --prompts FILE`.

The target answers greedily; then the draft reads each answer in one pass and says at every position what comes next.
A line of the file is a chat, {"messages"}, or a question of Spec-Bench, {"turns"}, of which the first turn is asked; it
may have a "category". The last line printed is JSON.
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
from transformers import AutoTokenizer

from specpool.distill.corpus import LONGEST_ANSWER, Writer, gathered
from specpool.distill.replay import ACCEPTANCE_AT, agreement_rate, mean_acceptance_length
from specpool.distill.template import ChatTemplate
from specpool.distill.training import Example, examples_of
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, source_of
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import load_engine
from specpool.rpc.config.settings import LogLevel, Settings, naming
from specpool.rpc.observability.logs import configure_logging

console = Console(stderr=True)

PROGRAM = "python -m specpool.distill.evaluate"
Chat = list[dict[str, str]]


class EvaluateSettings(Settings):
    """Measures how often a draft makes its target's choice, and what a round gains by it."""

    prompts: Path = Field(description="JSON lines: chats or questions of Spec-Bench")
    model: str | None = Field(None, description="folder of the draft; default: the embedded one")
    target: str | None = Field(None, description="folder of the target; default: the embedded one")
    max_sequences: int = Field(16, ge=1, description="answers written at a time")
    max_model_len: int = Field(2048, ge=512, description="positions of a dialogue; longer prompts are left out")
    device: str = Field("cpu", description="device of target and draft")
    log_level: LogLevel = Field("warning", description="least severe messages logged")


def main() -> None:
    """Entry point."""
    settings = EvaluateSettings.load(PROGRAM)
    configure_logging(settings.log_level)
    with naming(PROGRAM, "prompts", OSError, ValueError):
        chats = read_chats(settings.prompts)
    with naming(PROGRAM, "target", OSError):
        target = settings.target or str(embedded_pair().target)
        model = settings.model or str(embedded_pair().draft)
    result = evaluate(settings, chats, target, model)
    table = Table(*(name.replace("_", " ") for name in result["categories"][0]))
    for row in result["categories"]:
        table.add_row(*map(str, row.values()))
    console.print(table)
    print(json.dumps(result))


def evaluate(settings: EvaluateSettings, chats: dict[str, list[Chat]], target: str, model: str) -> dict[str, Any]:
    """Figures of every category, and last of all together. `chats`: by category."""
    with naming(PROGRAM, "target", OSError, ValueError, UnsupportedModelError):
        writing = engine_of(settings, target)
        tokenizer = AutoTokenizer.from_pretrained(**source_of(target, None))
        template = ChatTemplate.of(tokenizer, frozenset(writing.loaded.tokenizer.eos_token_ids))
    with naming(PROGRAM, "model", OSError, ValueError, UnsupportedModelError):
        draft = engine_of(settings, model)
        if draft.loaded.tokenizer.fingerprint != writing.loaded.tokenizer.fingerprint:
            raise ValueError(f"{model} has another tokenizer than the target {target}")
    with naming(PROGRAM, "prompts", TemplateError):
        prompts = {category: [tokens_of(chat, template) for chat in its] for category, its in chats.items()}
    writer = Writer(writing, template, seed=0)
    room, agreed, left_out = settings.max_model_len - LONGEST_ANSWER, dict[str, list[list[bool]]](), 0
    for category, questions in prompts.items():
        short = [tokens for tokens in questions if len(tokens) <= room]
        left_out += len(questions) - len(short)
        if short:
            answers = track(writer.answer(short), category, total=len(short), console=console, transient=True)
            agreed[category] = [agreement(draft, example) for example in examples_of(gathered(list(answers)))]
    agreed["all"] = [answer for answers in agreed.values() for answer in answers]
    rows = [{"category": category, **figures(answers)} for category, answers in agreed.items()]
    return {"model": model, "target": target, "left_out": left_out, "categories": rows}


def engine_of(settings: EvaluateSettings, model: str) -> Engine:
    """Loads a model as a worker does."""
    sizes = {"max_sequences": settings.max_sequences, "max_model_len": settings.max_model_len}
    return load_engine(EngineOptions(model=model, device=settings.device, **sizes), exact=False)


def read_chats(path: Path) -> dict[str, list[Chat]]:
    """All chats of a file by category. OSError; ValueError names a line that is no chat."""
    found = defaultdict(list)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                category, chat = _chat(json.loads(line))
            except (ValueError, TypeError, LookupError) as error:
                raise ValueError(f"line {number} is neither a chat nor a question of Spec-Bench: {error}") from None
            found[category].append(chat)
    if not found:
        raise ValueError(f"{path} holds none")
    return found


def _chat(record: Any) -> tuple[str, Chat]:
    chat = record["messages"] if "messages" in record else [{"role": "user", "content": record["turns"][0]}]
    category = record.get("category", "none")
    words = [category, *(message[name] for message in chat for name in ("role", "content"))]
    if not chat or not all(isinstance(word, str) for word in words):
        raise TypeError("a category, a role or a content is no text")
    return category, chat


def tokens_of(chat: Chat, template: ChatTemplate) -> list[int]:
    """The tokens that the target reads before it answers."""
    text = template.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return template.encode(text)


def agreement(draft: Engine, example: Example) -> list[bool]:
    """Whether the draft's choice at each position of an answer is the target's."""
    choices = example.top_ids[:, 0]
    logits = draft.forward([Span(0, 0, example.token_ids[:-1].tolist(), len(choices))])
    agreed: list[bool] = (draft.token_ids(logits.argmax(-1)).cpu() == choices).tolist()
    return agreed


def figures(agreed: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Numbers of answers and tokens, the share of tokens agreed upon, and mean acceptance lengths by draft length."""
    tokens, share = sum(map(len, agreed)), agreement_rate(agreed)
    lengths = {f"k={k}": round(mean_acceptance_length(agreed, k), 2) for k in ACCEPTANCE_AT}
    return {"answers": len(agreed), "tokens": tokens, "agreement": round(share, 3), **lengths}


if __name__ == "__main__":
    main()
