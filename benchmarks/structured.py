"""Measure structured output: what masks cost, and how fast constrained answers are.

    python -m benchmarks.structured [--prompts FILE] [--concurrencies 1,8] [--repeats 3] [--output FOLDER]

Each line of the prompts is {"id", "messages", "json_schema"}. One service answers all prompts in turns: "plain" without
speculation; "default" with it; and "lookup" by prompt lookup instead of the draft model. In the last two, the grammar
drafts, too. Ratios are taken within a repeat; the table shows medians. An answer is exact if it equals the first plain
answer, and valid if jsonschema accepts it; answers cut off by --max-tokens do not count as valid or invalid. With
--vllm, vLLM for the CPU answers the same prompts afterwards, without speculation and by its prompt lookup, in the
environment that SPECPOOL_VLLM_PYTHON names.

Another client streams an unconstrained answer meanwhile: alone, and beside a client that sends large and hostile
schemas one after the other; the table shows the times between its tokens.

Then the plain answers are replayed on the target's tokenizer, and on one enlarged to --vocabulary tokens: microseconds
of a position's mask, the share of positions where the grammar forces the next tokens, and the share of those tokens
that the answer indeed has. Last, passes of the target that verify --draft-tokens draft tokens are timed with and
without masks, interleaved. Exit status 1: an answer was not exact or not valid. The last line printed is JSON.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle, islice, pairwise
from pathlib import Path
from typing import Any

import jsonschema
import torch
from llguidance import grammar_from
from tokenizers import Tokenizer

from benchmarks.prompts import token_ids
from benchmarks.report import (
    console,
    finish,
    median,
    output_folder,
    parser_of,
    percentile,
    progress,
    seconds_of,
    show,
    whole,
    wholes,
)
from benchmarks.vllm_process import VllmEngine
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.client.requests import GenerateOptions
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.embedded_pair import embedded_pair, float32_copy
from specpool.engine.run.sequences import SequenceEngine
from specpool.engine.sampling.grammars import Grammars, SequenceGrammar
from specpool.engine.sampling.rules import SequenceRules
from specpool.engine.startup.loading import load_unproven_engine
from specpool.errors import InvalidArgumentError
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.v1 import generation_pb2 as pb

PROMPTS = Path(__file__).with_name("structured_prompts.jsonl")
PLAIN = "plain"
KINDS: dict[str, GenerateOptions] = {
    PLAIN: {"num_speculative_tokens": 0},
    "default": {},
    "lookup": {"draft_method": "ngram"},
}
LOAD = 3
"""Answers of a run per request in flight."""
MAX_FORCED = 16
STREAMED = 300
"""Tokens of the unconstrained stream."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A prompt and the schema of its answer."""

    name: str
    messages: list[Any]
    schema: Any

    @property
    def grammar(self) -> str:
        """The schema as the workers get it."""
        return grammar_from("json_schema", json.dumps(self.schema))


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSONL file; default: the benchmark's own")
    parser.add_argument("--concurrencies", type=wholes(1, 1000), default=[1, 8], metavar="1,8,...")
    parser.add_argument("--max-tokens", type=whole(1, 4000), default=160)
    parser.add_argument("--repeats", type=whole(1, 1000), default=3)
    parser.add_argument("--draft-tokens", type=whole(0, 64), default=4, help="of a timed pass")
    parser.add_argument("--vocabulary", type=whole(1000, 10**6), default=152_064, help="tokens of the larger tokenizer")
    parser.add_argument("--vllm", action="store_true", help="also measure vLLM")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    try:
        questions = read_questions(options.prompts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--prompts: {error!r}")
    try:
        rows, others, answers = asyncio.run(serve(questions, options))
    except ProcessFailedError as error:
        raise SystemExit(str(error)) from None
    show("constrained answers", rows)
    show("an unconstrained stream", others)
    peer = peer_rows(questions, options) if options.vllm else []
    show("vLLM", peer)
    masks, passes = mask_rows(answers, options)
    show("masks", masks)
    show("passes of the target with and without masks", passes)
    result = {"max_tokens": options.max_tokens, "repeats": options.repeats, "rows": rows, "masks": masks}
    finish("structured", {**result, "passes": passes, "others": others, "vllm": peer}, options.output)
    if any(row["exact_match"] < 1 or row["valid"] < 1 for row in rows):
        raise SystemExit("some answers differ from plain decoding, or are not valid")


def read_questions(path: Path) -> list[Question]:
    """All questions of a file."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError("no prompts")
    return [Question(line["id"], line["messages"], line["json_schema"]) for line in lines]


# --- The service


async def serve(
    questions: list[Question], options: argparse.Namespace
) -> tuple[list[Row], list[Row], list[tuple[Question, list[int]]]]:
    """A row for each concurrency and kind, rows of an unconstrained stream, and the plain answer to each question."""
    settings = UpSettings(
        port=0, log_level="error", drain_seconds=1, prefix_caching=False, max_num_seqs=max(options.concurrencies)
    )
    console.print("starting the service")
    truth: dict[str, list[int]] = {}
    async with running(settings) as address, AsyncClient(address) as client:
        for kind in KINDS:  # learn what rounds cost
            await run(client, questions, max(options.concurrencies), kind, options.max_tokens, truth)
        cases = [(concurrency, kind) for concurrency in options.concurrencies for kind in KINDS]
        runs: dict[tuple[int, str], list[Row]] = {case: [] for case in cases}
        for concurrency, kind in progress(cases * options.repeats, "runs"):
            asked = list(islice(cycle(questions), max(len(questions), LOAD * concurrency)))
            runs[concurrency, kind].append(await run(client, asked, concurrency, kind, options.max_tokens, truth))
        others = [await stream_row(client, beside) for beside in ("nobody", "hostile schemas")]
    rows = [summary(*case, found, runs[case[0], PLAIN]) for case, found in runs.items()]
    return rows, others, [(question, truth[question.name]) for question in questions]


async def run(
    client: AsyncClient,
    questions: Sequence[Question],
    concurrency: int,
    kind: str,
    max_tokens: int,
    truth: dict[str, list[int]],
) -> Row:
    """Answer all questions once. `truth`: the first answers, by name."""
    free, began = asyncio.Semaphore(concurrency), time.perf_counter()

    async def one(question: Question) -> pb.GenerateResponse:
        async with free:
            options: GenerateOptions = {"json_schema": question.schema, "max_tokens": max_tokens, **KINDS[kind]}
            return await client.generate(question.messages, **options)

    answers = await asyncio.gather(*map(one, questions))
    seconds = time.perf_counter() - began
    same = [
        truth.setdefault(question.name, list(answer.token_ids)) == list(answer.token_ids)
        for question, answer in zip(questions, answers, strict=True)
    ]
    ended = [pair for pair in zip(questions, answers, strict=True) if pair[1].finish_reason == "stop"]
    stats = [answer.speculative_decoding for answer in answers]
    accepted, rounds = sum(each.num_accepted_draft_tokens for each in stats), sum(each.num_spec_steps for each in stats)
    return {
        "tokens_per_s": sum(len(answer.token_ids) for answer in answers) / seconds,
        "acceptance_length": 1 + accepted / rounds if rounds else None,
        "ended": len(ended) / len(answers),
        "valid": statistics.mean(is_valid(question, answer.text) for question, answer in ended) if ended else 1.0,
        "exact_match": statistics.mean(same),
    }


async def stream_row(client: AsyncClient, beside: str) -> Row:
    """Times between the tokens of an unconstrained answer."""
    sent = asyncio.create_task(send_hostile(client)) if beside != "nobody" else None
    times = []
    async for message in client.stream("A story.", max_tokens=STREAMED, ignore_eos=True, num_speculative_tokens=0):
        if message.chunk.token_ids:
            times.append(time.perf_counter())
    if sent is not None:
        sent.cancel()
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    shown = {"p50_ms": percentile(gaps, 0.5), "p99_ms": percentile(gaps, 0.99), "max_ms": max(gaps)}
    return {"beside": beside, **{name: round(value or 0, 1) for name, value in shown.items()}}


async def send_hostile(client: AsyncClient) -> None:
    """Ask under large schemas, each a new one, until cancelled."""
    for number in count():
        branches = [{"type": "object", "properties": {f"k{number}_{i}": {"type": "integer"}}} for i in range(700)]
        nested = '{"type":"array","items":' * 100 + f'{{"const":{number}}}' + "}" * 100
        for schema in (json.dumps({"anyOf": branches}), nested, '{"type":"array","items":' * 5000):
            with suppress(InvalidArgumentError):
                await client.generate("JSON:", json_schema=schema, max_tokens=8)


def is_valid(question: Question, text: str) -> bool:
    """Whether a complete answer is valid under its schema."""
    try:
        jsonschema.validate(json.loads(text), question.schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def summary(concurrency: int, kind: str, runs: list[Row], plain: list[Row]) -> Row:
    """The row of a kind. `plain`: plain runs of the same repeats."""
    ratios = [one["tokens_per_s"] / base["tokens_per_s"] for one, base in zip(runs, plain, strict=True)]
    row: Row = {"concurrency": concurrency, "kind": kind, "tokens_per_s": round(median(runs, "tokens_per_s") or 0, 1)}
    row |= {"ratio": round(statistics.median(ratios), 3), "ratio_min": round(min(ratios), 3)}
    length = median(runs, "acceptance_length")
    row["acceptance_length"] = None if length is None else round(length, 2)
    return row | {name: round(min(one[name] for one in runs), 3) for name in ("ended", "valid", "exact_match")}


# --- vLLM


def peer_rows(questions: list[Question], options: argparse.Namespace) -> list[Row]:
    """The rows of vLLM."""
    target, rows = float32_copy(), []
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    lines = [PromptLine(question.name, question.messages) for question in questions]
    asked = list(zip(questions, token_ids(target, lines), strict=True))
    for kind in ("plain", "ngram"):
        with VllmEngine(target, kind, enforce_eager=True) as engine:
            engine.wait_ready()
            for concurrency in options.concurrencies:
                runs = []
                some = list(islice(cycle(asked), max(len(asked), LOAD * concurrency)))
                for _ in progress(range(1 + options.repeats), f"vLLM, {kind}, {concurrency} at a time"):
                    schemas = [question.schema for question, _ in some]
                    run = engine.run([ids for _, ids in some], options.max_tokens, concurrency, schemas)
                    texts = [
                        (question, tokenizer.decode(ids))
                        for (question, _), ids in zip(some, run["outputs"], strict=True)
                    ]
                    runs.append({"tokens_per_s": sum(map(len, run["outputs"])) / run["seconds"]})
                    runs[-1]["valid"] = statistics.mean(is_valid(*each) for each in texts)
                rows.append(
                    {
                        "concurrency": concurrency,
                        "kind": kind,
                        **{name: round(median(runs[1:], name) or 0, 3) for name in runs[0]},
                    }
                )
    return rows


# --- Masks


def mask_rows(answers: list[tuple[Question, list[int]]], options: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Costs of masks by vocabulary, and passes with and without them."""
    target = str(embedded_pair().target)
    engine = SequenceEngine(load_unproven_engine(EngineOptions(model=target, max_sequences=8), exact=True))
    files, size = engine.engine.loaded.tokenizer, engine.engine.vocab_size
    masks = [replayed(Grammars(files, size), size, answers)]
    masks.append(
        replayed(Grammars(enlarged(files, options.vocabulary), options.vocabulary), options.vocabulary, answers)
    )
    passes = [pass_row(engine, answers, sequences, options.draft_tokens, 30) for sequences in (1, 8)]
    return masks, passes


def enlarged(files: TokenizerFiles, size: int) -> TokenizerFiles:
    """The tokenizer with merges of its first tokens, until it has `size` tokens. Answers keep their tokens."""
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
    """The cost of the masks of all positions of the answers, and what the grammars force."""
    began = time.perf_counter()
    grammars.error_of("start: /x/")
    loaded = time.perf_counter()
    compiled, seconds, forced, right, forcing = [], [], 0, 0, 0
    for question, token_ids in progress(answers, f"masks of {size:,} tokens"):
        start = time.perf_counter()
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
    """The time of passes that verify drafts in the middle of answers, with and without grammars."""
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


if __name__ == "__main__":
    main()
