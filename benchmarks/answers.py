"""Streams answers, and computes speed, latencies, acceptance and exactness from them."""

import json
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.report import percentile
from benchmarks.runs import Run
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.client.requests import GenerateOptions
from specpool.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Answer:
    response: pb.GenerateResponse
    began: float
    arrivals: list[tuple[float, int]]
    """Times at which tokens arrived, and how many."""


async def streamed(client: AsyncClient, line: PromptLine, options: GenerateOptions) -> Answer:
    began, arrivals, response = time.perf_counter(), [], pb.GenerateResponse()
    async for message in client.stream(line.prompt, **options):
        if message.HasField("complete"):
            response = message.complete
        elif message.chunk.token_ids:
            arrivals.append((time.perf_counter(), len(message.chunk.token_ids)))
    return Answer(response, began, arrivals)


def measures(answers: list[Answer], seconds: float) -> Run:
    """Speed, latencies and acceptance of all answers together."""
    tokens = sum(len(answer.response.token_ids) for answer in answers)
    latencies = [1000 * latency for answer in answers for latency in token_latencies(answer.arrivals)]
    speculation = [answer.response.speculative_decoding for answer in answers]
    accepted = sum(each.num_accepted_draft_tokens for each in speculation)
    rounds = sum(each.num_spec_steps for each in speculation)
    return {
        "tokens_per_s": tokens / seconds,
        "sustained_tokens_per_s": sustained(answers),
        "first_token_ms": 1000 * statistics.median(answer.arrivals[0][0] - answer.began for answer in answers),
        "token_p50_ms": percentile(latencies, 0.5),
        "token_p99_ms": percentile(latencies, 0.99),
        "acceptance_length": 1 + accepted / rounds if rounds else None,
        "rounds_drafted": rounds / (tokens - accepted),
    }


def sustained(answers: list[Answer]) -> float | None:
    """Tokens per second until the last request began, with as many in flight as allowed. None if all began at once."""
    began, ended = min(answer.began for answer in answers), max(answer.began for answer in answers)
    arrivals = [each for answer in answers for each in answer.arrivals]
    tokens = sum(count for arrived, count in arrivals if arrived <= ended)
    return tokens / (ended - began) if tokens else None


def token_latencies(arrivals: list[tuple[float, int]]) -> list[float]:
    """Seconds of every token after the first message; tokens that arrive together share the time."""
    return [(now - before) / count for (before, _), (now, count) in pairwise(arrivals) for _ in range(count)]


def exact_match(lines: list[PromptLine], answers: list[Answer], truth: dict[str, list[int]]) -> float:
    """Share of answers equal to the known ones. The first answer to a prompt becomes the known one."""
    tokens = [list(answer.response.token_ids) for answer in answers]
    known = [truth.setdefault(json.dumps(line.prompt), ids) for line, ids in zip(lines, tokens, strict=True)]
    return sum(one == other for one, other in zip(tokens, known, strict=True)) / len(lines)
