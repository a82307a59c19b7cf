"""Answers as a client sees them arrive, and their speed, latency and acceptance."""

import math
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.client.requests import GenerateOptions
from specpool.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Answer:
    """One answer as the client got it."""

    response: pb.GenerateResponse
    began: float
    arrivals: list[tuple[float, int]]
    """Times at which tokens arrived, and how many."""


async def answer(client: AsyncClient, line: PromptLine, options: GenerateOptions) -> Answer:
    """The answer to one prompt, streamed."""
    began, arrivals, response = time.perf_counter(), [], pb.GenerateResponse()
    async for message in client.stream(line.prompt, **options):
        if message.HasField("complete"):
            response = message.complete
        elif message.chunk.token_ids:
            arrivals.append((time.perf_counter(), len(message.chunk.token_ids)))
    return Answer(response, began, arrivals)


def measures(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Speed, latencies and acceptance of all answers together."""
    tokens = sum(len(answer.response.token_ids) for answer in answers)
    latencies = [1000 * latency for answer in answers for latency in token_latencies(answer.arrivals)]
    speculation = [answer.response.speculative_decoding for answer in answers]
    accepted = sum(each.num_accepted_draft_tokens for each in speculation)
    rounds = sum(each.num_spec_steps for each in speculation)
    return {
        "tokens_per_s": tokens / seconds,
        "first_token_ms": 1000 * statistics.median(answer.arrivals[0][0] - answer.began for answer in answers),
        "token_p50_ms": percentile(latencies, 0.5),
        "token_p99_ms": percentile(latencies, 0.99),
        "acceptance_length": 1 + accepted / rounds if rounds else None,
        "rounds_drafted": rounds / (tokens - accepted),
    }


def token_latencies(arrivals: list[tuple[float, int]]) -> list[float]:
    """Seconds of every token after the first ones: tokens that arrive together share the time since those before."""
    return [(now - before) / count for (before, _), (now, count) in pairwise(arrivals) for _ in range(count)]


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that this share of the values does not exceed; None without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None
