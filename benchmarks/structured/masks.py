"""The cost of masks, by vocabulary and in a pass of the target."""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from benchmarks.report import percentile, progress, seconds_of
from benchmarks.structured.questions import Question
from specpool.engine.config.options import MAX_GRAMMAR_MEMORY, EngineOptions
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.run.sequences import SequenceEngine
from specpool.engine.sampling.grammars import Grammars
from specpool.engine.sampling.masks import SequenceGrammar
from specpool.engine.sampling.rules import SequenceRules
from specpool.engine.startup.loading import load_unproven_engine
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.tokenizer import TokenizerFiles

MAX_FORCED = 16

Row = dict[str, Any]


def mask_rows(answers: list[tuple[Question, list[int]]], options: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Costs of masks by vocabulary, and passes with and without them."""
    target = str(embedded_pair().target)
    engine = SequenceEngine(load_unproven_engine(EngineOptions(model=target, max_sequences=8), exact=True))
    files, size = engine.engine.loaded.tokenizer, engine.engine.vocab_size
    sizes = {size: files, options.vocabulary: enlarged(files, options.vocabulary)}
    masks = [replayed(Grammars(own, number, MAX_GRAMMAR_MEMORY), number, answers) for number, own in sizes.items()]
    passes = [pass_row(engine, answers, sequences, options.draft_tokens, 30) for sequences in (1, 8)]
    return masks, passes


def enlarged(files: TokenizerFiles, size: int) -> TokenizerFiles:
    """The tokenizer with merges of its first tokens added, up to `size` tokens. Answers keep their tokens."""
    tokenizer = json.loads(files.tokenizer_json)
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    common = sorted(vocab, key=vocab.__getitem__)[300:1200]
    numbers = iter(range(max(vocab.values()) + 1, size))
    for first in common:
        for second in common:
            if first + second not in vocab:
                number = next(numbers, None)
                if number is None:
                    return replace(files, tokenizer_json=json.dumps(tokenizer).encode())
                vocab[first + second] = number
                merges.append([first, second] if isinstance(merges[0], list) else f"{first} {second}")
    raise ValueError(f"--vocabulary: cannot enlarge the tokenizer to {size} tokens")


def replayed(grammars: Grammars, size: int, answers: list[tuple[Question, list[int]]]) -> Row:
    """The cost of the masks at all positions of the answers, and the share of forced tokens."""
    began = time.perf_counter()
    grammars.error_of("start: /x/")
    loaded = time.perf_counter()
    compiled, seconds, forced, right, forcing = [], [], 0, 0, 0
    for question, token_ids in progress(answers, f"masks of {size:,} tokens"):
        start = time.perf_counter()
        grammars.error_of(question.grammar)
        grammar = grammars.start(question.grammar, 0)
        compiled.append(time.perf_counter() - start)
        for length in range(len(token_ids)):
            seconds.append(seconds_of(partial(grammar.masks, token_ids[:length], 1)))
            following = grammar.forced(token_ids[:length], MAX_FORCED)
            forcing += bool(following)
            forced += len(following)
            pairs = zip(following, token_ids[length:], strict=False)
            right += next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), len(following))
    micros = sorted(1e6 * each for each in seconds)
    return {
        "vocabulary": size,
        "load_s": round(loaded - began, 2),
        "compile_ms": round(1e3 * statistics.median(compiled), 1),
        "positions": len(micros),
        "mask_us": round(statistics.median(micros), 1),
        "p99_us": round(percentile(micros, 0.99) or 0, 1),
        "max_us": round(micros[-1], 1),
        "forcing": round(forcing / len(micros), 3),
        "forced_right": round(right / max(1, forced), 3),
    }


def pass_row(
    engine: SequenceEngine, answers: list[tuple[Question, list[int]]], sequences: int, drafts: int, repeats: int
) -> Row:
    """The time of passes that verify drafts in the middle of answers, with and without masks."""
    texts = [token_ids[: len(token_ids) // 2 + drafts + 1] for _, token_ids in islice(cycle(answers), sequences)]
    questions = [question for question, _ in islice(cycle(answers), sequences)]
    slots = engine.engine.slots
    keys = [("benchmark", number) for number in range(sequences)]
    masks: dict[bool, list[float]] = {False: [], True: []}
    rules = {}
    for key, question, text in zip(keys, questions, texts, strict=True):
        slots.realign(key, 1, 0, len(text))
        grammar: SequenceGrammar = engine.grammars.start(question.grammar, 0)
        rules[key] = SequenceRules(SamplingParams(grammar=question.grammar), grammar)
        engine.choose({key: engine.span(key, text, 0)})
    for repeat in progress(range(2 * repeats), f"passes of {sequences}"):
        is_masked = bool(repeat % 2)
        spans = {}
        for key, text in zip(keys, texts, strict=True):
            slots[key].sampling = rules[key] if is_masked else None
            engine.keep(key, len(text) - drafts - 1)
            spans[key] = engine.span(key, text[-drafts - 1 :], drafts + 1)
        masks[is_masked].append(seconds_of(partial(engine.choose, spans)))
    without, with_masks = (1e3 * statistics.median(masks[each]) for each in (False, True))
    engine.release("benchmark", None)
    return {
        "sequences": sequences,
        "draft_tokens": drafts,
        "threads": torch.get_num_threads(),
        "without_ms": round(without, 3),
        "with_ms": round(with_masks, 3),
        "added": round(with_masks / without - 1, 3),
    }
