"""Answers of the whole service, with drafts that are right in about 70% of the tokens."""

import asyncio
import json
import operator
import time
from itertools import cycle, islice
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from benchmarks.gpu.folders import ACCEPTANCE, make_models
from benchmarks.gpu.part import Findings, Row, Settings
from benchmarks.throughput import ARRANGEMENTS, PLAIN, Load, run, summary
from benchmarks.throughput import KINDS as OPTIONS
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import own_prompts
from specpool.client.requests import GenerateOptions
from specpool.v1 import common_pb2

Logprobs = list[common_pb2.TokenLogprobs]
KINDS = [PLAIN, "k2", "k4", "adaptive"]
# Kinds whose log-probabilities are compared, and the most probable tokens of each position to compare.
COMPARED, TOP_LOGPROBS = [PLAIN, "k4"], 5
SERVICES = {
    "colocated head": ("colocated", "head"),
    "colocated": ("colocated", "draft"),
    "separate": ("separate", "draft"),
}
"""The arrangement and the draft's folder of each service, most important first."""
SEPARATE_BYTES = 2**34
"""Memory for each cache of separate workers, which must be given if they share a GPU."""
# Minimum seconds left to start another service, and another run.
SERVICE_SECONDS, RUN_SECONDS = 40, 10


def measure_pair(settings: Settings, findings: Findings) -> None:
    folder = make_models(settings)
    findings.add(acceptance=ACCEPTANCE, max_tokens=settings.sizes.max_tokens, prompts_per_request=settings.sizes.load)
    asyncio.run(serve(settings, findings, folder))
    rows = [*findings.result.get("runs", ()), *findings.result.get("logprobs", ())]
    if any(row["exact_match"] < 1 for row in rows):
        raise RuntimeError("some answers differ from plain decoding")


async def serve(settings: Settings, findings: Findings, folder: Path) -> None:
    """Measure services whose target worker carries the draft, then one with a draft worker."""
    truth: dict[str, list[int]] = {}
    probabilities: dict[str, Logprobs] = {}
    for service in SERVICES:
        if findings.fits(settings, service, SERVICE_SECONDS):
            await serve_one(service, settings, findings, folder, truth, probabilities)


async def serve_one(
    service: str,
    settings: Settings,
    findings: Findings,
    folder: Path,
    truth: dict[str, list[int]],
    probabilities: dict[str, Logprobs],
) -> None:
    """Measure all concurrencies of one service. `truth`, `probabilities`: of the plain answers so far."""
    arrangement, draft = SERVICES[service]
    is_separate = ARRANGEMENTS[arrangement]
    memory = SEPARATE_BYTES if is_separate and settings.device != "cpu" else None
    up = UpSettings(
        port=0, log_level="warning", drain_seconds=1, prefix_caching=False, max_num_seqs=max(settings.sizes.batches),
        target=str(folder / "target"), draft=str(folder / draft), target_device=(settings.device,),
        draft_device=(settings.device,), separate=is_separate, target_kv_memory=memory, draft_kv_memory=memory,
    )  # fmt: skip
    began, named = time.perf_counter(), {"arrangement": service}
    async with running(up) as address, AsyncClient(address) as client:
        findings.add_row("services", {**named, "started_s": round(time.perf_counter() - began, 1)})
        info = await client.model_info()
        for name, model in (("target", info.target), ("draft", info.draft)):
            findings.add(**{name: MessageToDict(model, preserving_proto_field_name=True)})
        for concurrency in settings.sizes.batches:
            if findings.fits(settings, f"{concurrency} at a time, {service}", RUN_SECONDS):
                for row in await rows_of(client, settings, concurrency, truth):
                    findings.add_row("runs", {**named, **row})
                for row in await logprobs_rows(client, settings, concurrency, probabilities):
                    findings.add_row("logprobs", {**named, **row})


async def rows_of(client: AsyncClient, settings: Settings, concurrency: int, truth: dict[str, list[int]]) -> list[Row]:
    """One row per kind: medians over interleaved runs. `truth`: the plain answers so far."""
    sizes = settings.sizes
    lines = list(islice(cycle(own_prompts()), sizes.load * concurrency))
    load = Load(concurrency, lines, KINDS)
    await run(client, load, KINDS[-1], sizes.max_tokens, {})  # warms up the cost model
    runs: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for repeat in range(sizes.runs):
        if repeat and settings.seconds_left < RUN_SECONDS:
            break
        for kind in KINDS:
            runs[kind].append(await run(client, load, kind, sizes.max_tokens, truth))
    return [{**summary(load, kind, own, runs[PLAIN]), "runs": len(own)} for kind, own in runs.items()]


async def logprobs_rows(
    client: AsyncClient, settings: Settings, concurrency: int, truth: dict[str, Logprobs]
) -> list[Row]:  # fmt: skip
    """One row per kind: share of answers whose log-probabilities have the bits of the plain ones, kept in `truth`."""
    lines, rows = list(islice(cycle(own_prompts()), concurrency)), []
    for kind in COMPARED:
        options: GenerateOptions = {"max_tokens": settings.sizes.max_tokens, "logprobs": TOP_LOGPROBS, **OPTIONS[kind]}
        answers = await asyncio.gather(*(client.generate(line.prompt, **options) for line in lines))
        found = [list(answer.logprobs) for answer in answers]
        known = [truth.setdefault(json.dumps(line.prompt), own) for line, own in zip(lines, found, strict=True)]
        equal = sum(map(operator.eq, found, known)) / concurrency
        rows.append({"concurrency": concurrency, "kind": kind, "tokens": sum(map(len, found)), "exact_match": equal})
    return rows
