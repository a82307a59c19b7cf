"""`specpool demo`: starts a pair, generates with and without speculation, and compares the tokens."""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from specpool.cli.generate import sure_answers
from specpool.cli.processes import ProcessFailedError, require_torch
from specpool.cli.top_view import equivalence_name
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine, own_prompts, read_prompt_file, reason_of
from specpool.errors import SpecpoolError
from specpool.rpc.config.settings import UINT32_MAX, LogLevel, Seconds
from specpool.v1 import generation_pb2 as pb


class DemoSettings(UpSettings):
    """Run prompts with and without speculation, and compare the results. Default: the embedded pair."""

    port: int = Field(0, ge=0, le=65535, description="port of the coordinator; 0 lets the system choose")
    log_level: LogLevel = Field("error", description="minimum level of logged messages")
    prefix_caching: bool = Field(False, description="cache prompts; then only the first run prefills them")
    drain_seconds: Seconds = Field(5.0, ge=0, description="time for running calls to finish at the end")
    prompts: Path | None = Field(
        None, description="JSONL file of prompts; - for standard input; default: a small built-in set"
    )
    num_prompts: int = Field(16, ge=1, description="number of prompts to use, from the start of the file")
    max_tokens: int = Field(128, ge=1, le=UINT32_MAX, description="maximum tokens to generate for each prompt")
    concurrency: int = Field(4, ge=1, description="requests in flight")
    repeats: int = Field(2, ge=1, description="runs of each kind; the medians are shown")
    json_object: bool = Field(False, alias="json", description="print the results as a JSON object")


ROWS = {
    "prompts": ("prompts", "{}"),
    "completion_tokens": ("generated tokens", "{:,}"),
    "plain_tokens_per_s": ("plain decoding", "{:.1f} tokens/s"),
    "speculative_tokens_per_s": ("with speculation", "{:.1f} tokens/s"),
    "speedup": ("speed-up", "{:.2f}x"),
    "tokens_per_round": ("tokens per round, over all rounds", "{:.2f}"),
    "drafted_share": ("rounds with draft tokens", "{:.0%}"),
    "mean_acceptance_length": ("tokens per round with draft tokens", "{:.2f}"),
    "draft_acceptance_rate": ("draft tokens accepted", "{:.0%}"),
    "exact_match": ("answers equal to plain decoding", "{:.0%}"),
    "equivalence": ("target exactness", "{}"),
    "target_activations": ("target activations", "{}"),
}
"""Name and format of each result in the table."""


@dataclass(frozen=True)
class Run:
    responses: list[pb.GenerateResponse]
    seconds: float

    @property
    def completion_tokens(self) -> int:
        return sum(response.usage.completion_tokens for response in self.responses)

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.seconds


def demo(settings: DemoSettings) -> int:
    """Run the command; return its exit status."""
    try:
        lines = own_prompts() if settings.prompts is None else read_prompt_file(settings.prompts)
        if not lines:
            raise ValueError("no prompts found")
    except (OSError, ValueError) as error:
        print(f"specpool demo: {settings.prompts}: {reason_of(error)}", file=sys.stderr)
        return 2
    try:
        require_torch()
        result, answer = asyncio.run(_demo(settings, lines[: settings.num_prompts]))
    except asyncio.CancelledError:  # by a stop signal
        return 130
    except (ProcessFailedError, SpecpoolError) as error:
        print(f"specpool demo: {error}", file=sys.stderr)
        return error.status if isinstance(error, ProcessFailedError) else 1
    if settings.json_object:
        print(json.dumps(result))
        return 0
    console = Console()
    console.print(f"\n[bold]One of the answers[/bold]\n{answer.strip()}\n", highlight=False)
    console.print(table_of(result))
    return 0


def table_of(result: Mapping[str, object]) -> Table:
    """Build the table that the command prints."""
    table = Table(show_header=False)
    for key, value in result.items():
        name, template = ROWS[key]
        table.add_row(name, template.format(value))
    return table


async def _demo(settings: DemoSettings, lines: list[PromptLine]) -> tuple[dict[str, object], str]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        starting = progress.add_task("starting the processes", total=None)
        async with running(settings) as address, AsyncClient(address) as client:
            progress.update(starting, visible=False)
            task = progress.add_task("generating", total=2 * settings.repeats * len(lines))
            plain, speculative = [], []
            async for _ in sure_answers(client, lines[:2], settings.concurrency, max_tokens=settings.max_tokens):
                pass  # warms up both workers
            for _ in range(settings.repeats):  # interleaved, because machines are noisy
                plain.append(await _run(client, lines, settings, 0, progress, task))
                speculative.append(await _run(client, lines, settings, None, progress, task))
            info = await client.model_info()
    return result_of(plain, speculative, info), speculative[0].responses[0].text


async def _run(
    client: AsyncClient,
    lines: list[PromptLine],
    settings: DemoSettings,
    k: int | None,
    progress: Progress,
    task: TaskID,
) -> Run:
    began = time.perf_counter()
    responses = []
    options = {"max_tokens": settings.max_tokens, "num_speculative_tokens": k}
    async for response in sure_answers(client, lines, settings.concurrency, **options):
        responses.append(response)
        progress.advance(task)
    return Run(responses, time.perf_counter() - began)


def result_of(plain: list[Run], speculative: list[Run], info: pb.GetModelInfoResponse) -> dict[str, object]:
    """Compare runs with and without speculation."""
    reference = [list(response.token_ids) for response in plain[0].responses]
    runs = [*plain, *speculative]
    equal = sum(all(list(run.responses[i].token_ids) == tokens for run in runs) for i, tokens in enumerate(reference))
    totals = [response.speculative_decoding for response in speculative[0].responses]
    drafted_rounds = sum(total.num_spec_steps for total in totals)
    drafted = sum(total.num_draft_tokens for total in totals)
    accepted = sum(total.num_accepted_draft_tokens for total in totals)
    tokens = speculative[0].completion_tokens
    rounds = tokens - accepted  # each round gains one token more than it accepts
    plain_rate = statistics.median(run.tokens_per_s for run in plain)
    speculative_rate = statistics.median(run.tokens_per_s for run in speculative)
    return {
        "prompts": len(reference),
        "completion_tokens": plain[0].completion_tokens,
        "plain_tokens_per_s": round(plain_rate, 2),
        "speculative_tokens_per_s": round(speculative_rate, 2),
        "speedup": round(speculative_rate / plain_rate, 3),
        "tokens_per_round": round(tokens / rounds, 3),
        "drafted_share": round(drafted_rounds / rounds, 3),
        "mean_acceptance_length": round(1 + accepted / drafted_rounds if drafted_rounds else 0.0, 3),
        "draft_acceptance_rate": round(accepted / drafted if drafted else 0.0, 3),
        "exact_match": equal / len(reference),
        "equivalence": equivalence_name(info.target),
        "target_activations": info.target.activations,
    }
