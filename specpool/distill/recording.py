"""Training examples from recorded answers, for `specpool distill --from DIR`.

A recording has no prompts and only the chosen tokens. Each token is therefore the only candidate at its position, and
the chat template's header of an answer replaces the prompt.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path

import torch
from jinja2 import TemplateError

from specpool.distill.examples import TOP, Example
from specpool.distill.progress import console
from specpool.distill.questions import ChatTemplate
from specpool.engine.models.tokenizer import load_tokenizer
from specpool.protocol.recordings import RecordedAnswer, read_shard, shards_in
from specpool.protocol.tokenizer import TokenizerFiles

MIN_ANSWERS = 64
MAX_HELD_OUT_SHARE = 8
"""Hold out at most 1/MAX_HELD_OUT_SHARE of the answers."""
MIN_TOKENS, MAX_TOKENS = 4, 1024
"""Skip shorter answers and truncate longer ones."""


def read_recording(folder: Path, fingerprint: str, vocab_size: int, count: int) -> list[RecordedAnswer]:
    """Return at most `count` distinct answers from a folder, newest first.

    `fingerprint`: of the target's tokenizer. Raises OSError and ValueError, which name the file or folder.
    """
    paths = sorted(shards_in(folder), key=lambda path: path.stat().st_mtime, reverse=True)
    answers = list(islice(_distinct(_newest_first(paths, fingerprint)), count))
    if len(answers) < MIN_ANSWERS:
        raise ValueError(f"{folder} has {len(answers)} distinct answers, but training needs at least {MIN_ANSWERS}")
    if (largest := max(max(answer.token_ids) for answer in answers)) >= vocab_size:
        raise ValueError(f"{folder} has token id {largest}, but the target has only {vocab_size} tokens")
    return answers


def _newest_first(paths: Iterable[Path], fingerprint: str) -> Iterator[RecordedAnswer]:
    """Yield the answers of the shards that come from the same weights as the first shard."""
    weights, left_out = None, 0
    for path in paths:
        if (shard := read_shard(path)) is None:
            continue
        header, answers = shard
        if header.tokenizer_fingerprint != fingerprint:
            raise ValueError(f"{path} has answers of {header.model}, which uses a different tokenizer than the target")
        weights = weights or header.weights_fingerprint
        if header.weights_fingerprint == weights:
            yield from reversed(answers)
        else:
            left_out += len(answers)
    if left_out:
        console.print(f"ignoring {left_out:,} answers of a target with other weights")


def _distinct(answers: Iterable[RecordedAnswer]) -> Iterator[RecordedAnswer]:
    seen = set()
    for answer in answers:
        if len(answer.token_ids) >= MIN_TOKENS and answer.token_ids not in seen:
            seen.add(answer.token_ids)
            yield answer


def split(answers: list[RecordedAnswer], held_out: int) -> tuple[list[RecordedAnswer], list[RecordedAnswer]]:
    """Split answers into held-out answers and training answers. Deterministic.

    Hold out whole clients, in the order of their hashes, if that yields at least half of `held_out`. Otherwise hold out
    answers regardless of client.
    """
    held_out = min(held_out, len(answers) // MAX_HELD_OUT_SHARE)
    sizes, chosen, room = Counter(answer.client for answer in answers), set(), held_out
    for client in sorted(sizes, key=lambda client: sha256(client.encode()).digest()):
        if sizes[client] <= room:
            chosen.add(client)
            room -= sizes[client]
    if room <= held_out // 2:
        apart = [answer for answer in answers if answer.client in chosen]
        return apart, [answer for answer in answers if answer.client not in chosen]
    answers = sorted(answers, key=lambda answer: sha256(repr(answer.token_ids).encode()).digest())
    return answers[:held_out], answers[held_out:]


def recorded_examples(
    folder: Path, target: str, vocab_size: int, count: int, held_out: int
) -> tuple[list[Example], list[Example]]:
    """Return the held-out examples and the training examples. Raises OSError and ValueError."""
    tokenizer = load_tokenizer(target)
    fingerprint = TokenizerFiles(tokenizer.backend_tokenizer.to_str().encode(), "", {}, ()).fingerprint
    answers = read_recording(folder, fingerprint, vocab_size, count)
    try:
        before = ChatTemplate.of(tokenizer, frozenset()).before_answer
    except (TemplateError, ValueError):  # the target has no chat template, or one without turns
        before = ()
    apart, others = split(answers, held_out)
    return [example_of(each, before) for each in apart], [example_of(each, before) for each in others]


def fingerprint_of(examples: Iterable[Example]) -> str:
    """Return a short hash of the examples' tokens."""
    digest = sha256()
    for example in examples:
        digest.update(example.token_ids.numpy().tobytes() + b"|")
    return digest.hexdigest()[:8]


def example_of(answer: RecordedAnswer, before: tuple[int, ...]) -> Example:
    """Return an example whose only candidates are the recorded tokens. `before`: tokens before an answer."""
    tokens = torch.tensor([*before, *answer.token_ids[:MAX_TOKENS]])
    start = max(1, len(before))
    top_ids = tokens[start:, None].int().repeat(1, TOP)
    top_logprobs = torch.full(top_ids.shape, -torch.inf, dtype=torch.float16)
    top_logprobs[:, 0] = 0
    return Example(tokens, start, top_ids, top_logprobs)
