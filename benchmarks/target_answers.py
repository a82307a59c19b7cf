"""Greedy answers of the embedded target to multi-turn conversations, generated once and stored in a file."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import console
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.models.tokenizer import load_tokenizer
from specpool.engine.startup.loading import load_unproven_engine

BATCH = 16


@dataclass(frozen=True)
class Turn:
    """A prompt, which includes all earlier turns, and the target's answer."""

    category: str
    number: int
    """0 for the first turn of a conversation."""
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Conversation:
    category: str
    questions: tuple[str, ...]


@dataclass
class _Chat:
    """A conversation being answered."""

    conversation: Conversation
    slot: int
    messages: list[dict[str, str]]
    turns: list[Turn]

    @property
    def is_complete(self) -> bool:
        return len(self.turns) == len(self.conversation.questions)


def read_conversations(path: Path) -> list[Conversation]:
    """Read Spec-Bench questions: JSON lines of {"category", "turns"}.

    Raises OSError, ValueError, LookupError or TypeError for an invalid file.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Conversation(record["category"], tuple(record["turns"])) for record in records]


def load_turns(conversations: Sequence[Conversation], tokens: int, path: Path | None) -> list[Turn]:
    """Return the answers, of at most `tokens` tokens each. `path`: file to read them from, or to write if missing."""
    if path is not None and path.exists():
        return [Turn(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    turns = [turn for chat in _answers(conversations, tokens) for turn in chat.turns]
    if path is not None:
        path.write_text("".join(json.dumps(asdict(turn)) + "\n" for turn in turns), encoding="utf-8")
    return turns


def load_target_tokenizer() -> Any:
    """Return the tokenizer of the embedded target."""
    return load_tokenizer(str(embedded_pair().target))


@torch.inference_mode()
def _answers(conversations: Sequence[Conversation], tokens: int) -> Iterator[_Chat]:
    """Answer up to `BATCH` conversations at a time. Yield each conversation when it is complete."""
    options = EngineOptions(model=str(embedded_pair().target), device="cpu", max_sequences=BATCH)
    engine = load_unproven_engine(options, exact=True)
    tokenizer, waiting = load_target_tokenizer(), deque(conversations)
    active: list[tuple[_Chat, Span]] = []
    free, finished = [engine.slots.take(("chat", i), engine.max_model_len) for i in range(BATCH)], 0
    slots = [slot.index for slot in free if slot is not None]
    while waiting or active:
        while waiting and slots:
            chat = _Chat(waiting.popleft(), slots.pop(), [], [])
            active.append((chat, _next_turn(chat, tokenizer, engine.max_model_len - tokens)))
        chosen = engine.head.token_ids(engine.forward([span for _, span in active]).argmax(-1)).tolist()
        going, active = active, []
        for (chat, span), token in zip(going, chosen, strict=True):
            turn = chat.turns[-1]
            turn.answer.append(token)
            if token not in engine.loaded.tokenizer.eos_token_ids and len(turn.answer) < tokens:
                active.append((chat, Span(chat.slot, span.end, [token], 1)))
            elif not chat.is_complete:
                text = tokenizer.decode(turn.answer, skip_special_tokens=True)
                chat.messages.append({"role": "assistant", "content": text})
                active.append((chat, _next_turn(chat, tokenizer, engine.max_model_len - tokens)))
            else:
                slots.append(chat.slot)
                finished += 1
                console.print(f"answered {finished} of {len(conversations)} conversations")
                yield chat


def _next_turn(chat: _Chat, tokenizer: Any, limit: int) -> Span:
    """Append the next question, and return a span over the whole chat."""
    number = len(chat.turns)
    chat.messages.append({"role": "user", "content": chat.conversation.questions[number]})
    prompt = list(tokenizer.apply_chat_template(chat.messages, add_generation_prompt=True, return_dict=False))
    if len(prompt) > limit:
        raise ValueError(f"a prompt has {len(prompt)} tokens; the limit is {limit}")
    chat.turns.append(Turn(chat.conversation.category, number, prompt, []))
    return Span(chat.slot, 0, prompt, 1)
