"""Measure the speed of generation with predictions.

    python -m benchmarks.predictions [--prompts FILE] [--concurrencies 1,8] [--repeats 5] [--output FOLDER]

One service answers all prompts in alternation: "plain" without speculation, "default" without a prediction, "edited"
and "wrong" with one. The edited prediction is the plain answer with three words replaced, six inserted and six deleted,
each in one place. The wrong prediction has the words of the plain answer in reverse order. Prompts whose answers are
shorter than --min-tokens are skipped.

Ratios compare runs of the same repeat: "edited" with "plain", and "wrong" with "default". The table shows medians. Exit
status 1: an answer differs from the plain one. The last line printed is JSON.
"""

import argparse
import asyncio
import json
import time
from itertools import cycle, islice

from benchmarks.prompts import add_prompts, checked, load_prompts
from benchmarks.report import console, finish, median, output_folder, parser_of, show, whole, wholes
from benchmarks.runs import Run, in_turns, ratios, spread
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.client.requests import GenerateOptions
from specpool.v1 import generation_pb2 as pb

PLAIN, DEFAULT, EDITED, WRONG = KINDS = "plain", "default", "edited", "wrong"
BASES = {DEFAULT: PLAIN, EDITED: PLAIN, WRONG: DEFAULT}
"""Baseline of each kind."""
LOAD = 2
"""Minimum number of answers in a run, per request in flight."""


def edited(text: str) -> str:
    """Replace three words, insert six and delete six, each in one place."""
    words, at = text.split(" "), len(text.split(" ")) // 4
    new = words[::-7]
    parts = words[:at], new[:3], words[at + 3 : 2 * at], new[3:9], words[2 * at : 3 * at], words[3 * at + 6 :]
    return " ".join(word for part in parts for word in part)


def wrong(text: str) -> str:
    return " ".join(reversed(text.split(" ")))


class Benchmark:
    """Answers the same prompts with each kind of prediction."""

    def __init__(self, client: AsyncClient, max_tokens: int) -> None:
        self._client, self._max_tokens = client, max_tokens
        self._answers: dict[str, pb.GenerateResponse] = {}
        """Plain answer by prompt."""

    async def learn(self, lines: list[PromptLine], min_tokens: int) -> list[PromptLine]:
        """Answer all prompts without speculation. Return the prompts with long enough answers."""
        for line in lines:
            answer = await self._client.generate(line.prompt, max_tokens=self._max_tokens, num_speculative_tokens=0)
            self._answers[_key(line)] = answer
        return [line for line in lines if len(self._answers[_key(line)].token_ids) >= min_tokens]

    async def run(self, lines: list[PromptLine], concurrency: int, kind: str) -> Run:
        """Answer all prompts once."""
        free, began = asyncio.Semaphore(concurrency), time.perf_counter()

        async def one(line: PromptLine) -> pb.GenerateResponse:
            async with free:
                return await self._client.generate(line.prompt, **self._options(line, kind))

        answers = await asyncio.gather(*map(one, lines))
        seconds, usage = time.perf_counter() - began, [answer.usage for answer in answers]
        pairs = ((answer, self._answers[_key(line)]) for line, answer in zip(lines, answers, strict=True))
        return {
            "tokens_per_s": sum(len(answer.token_ids) for answer in answers) / seconds,
            "accepted": sum(each.accepted_prediction_tokens for each in usage) / len(usage),
            "rejected": sum(each.rejected_prediction_tokens for each in usage) / len(usage),
            "exact_match": sum(answer.token_ids == plain.token_ids for answer, plain in pairs) / len(answers),
        }

    def _options(self, line: PromptLine, kind: str) -> GenerateOptions:
        text = self._answers[_key(line)].text
        options: dict[str, GenerateOptions] = {
            PLAIN: {"num_speculative_tokens": 0},
            DEFAULT: {},
            EDITED: {"prediction": edited(text)},
            WRONG: {"prediction": wrong(text)},
        }
        return {"max_tokens": self._max_tokens, **options[kind]}


def _key(line: PromptLine) -> str:
    return json.dumps(line.prompt)


async def serve(lines: list[PromptLine], options: argparse.Namespace) -> list[Run]:
    settings = UpSettings(
        port=0, log_level="error", drain_seconds=1, prefix_caching=False, max_num_seqs=max(options.concurrencies)
    )
    console.print("starting the service")
    async with running(settings) as address, AsyncClient(address) as client:
        benchmark = Benchmark(client, options.max_tokens)
        found = await benchmark.learn(lines, options.min_tokens)
        if not found:
            raise RuntimeError(f"no answer has {options.min_tokens} tokens")
        cases = [(concurrency, kind) for concurrency in options.concurrencies for kind in KINDS]

        async def answered(case: tuple[int, str]) -> Run:
            return await benchmark.run(list(islice(cycle(found), max(len(found), LOAD * case[0]))), *case)

        for case in cases:  # warm up: the server learns the costs of rounds
            await answered(case)
        runs = await in_turns(cases, options.repeats, answered)
    return [summary(*case, found, runs[case[0], BASES.get(case[1], PLAIN)]) for case, found in runs.items()]


def summary(concurrency: int, kind: str, runs: list[Run], base: list[Run]) -> Run:
    """Return the row of a kind. `base`: runs of its baseline in the same repeats."""
    row: Run = {"concurrency": concurrency, "kind": kind, "tokens_per_s": round(median(runs, "tokens_per_s") or 0, 1)}
    row |= {"to": BASES.get(kind, PLAIN), **spread(ratios(runs, base, "tokens_per_s"))}
    row |= {name: round(median(runs, name) or 0, 1) for name in ("accepted", "rejected")}
    return row | {"exact_match": round(min(run["exact_match"] for run in runs), 3)}


def main() -> None:
    parser = parser_of(__doc__)
    add_prompts(parser)
    parser.add_argument("--num-prompts", type=whole(1, 1000), default=8)
    parser.add_argument("--concurrencies", type=wholes(1, 1000), default=[1, 8], metavar="1,8,...")
    parser.add_argument("--max-tokens", type=whole(1, 4000), default=400)
    parser.add_argument("--min-tokens", type=whole(1, 4000), default=200, help="minimum of a plain answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    lines = checked(parser, lambda: load_prompts(options.prompts, options.num_prompts))
    try:
        rows = asyncio.run(serve(lines, options))
    except (ProcessFailedError, OSError, RuntimeError) as error:
        raise SystemExit(str(error)) from None
    show("answers with a prediction", rows)
    finish("predictions", {"max_tokens": options.max_tokens, "repeats": options.repeats, "rows": rows}, options.output)
    if any(row["exact_match"] < 1 for row in rows):
        raise SystemExit("some answers differ from plain decoding")


if __name__ == "__main__":
    main()
