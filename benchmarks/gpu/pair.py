"""Whole answers by real workers and coordinator, of a pair whose draft is right about 70% of the tokens."""

import asyncio
import gc
import time
from itertools import cycle, islice
from pathlib import Path

import torch
from google.protobuf.json_format import MessageToDict

from benchmarks.gpu.part import Findings, Row, Settings
from benchmarks.pair import partly_wrong, path_through, save_model
from benchmarks.shapes import SHAPES
from benchmarks.throughput import PLAIN, Load, run, summary
from specpool.cli.up import UpSettings, running
from specpool.client import AsyncClient
from specpool.client.prompts import own_prompts
from specpool.engine.config.devices import pick_device

ACCEPTANCE = 0.7
KINDS = [PLAIN, "k2", "k4", "adaptive"]
# Seconds that are left to end the service.
ENDING = 10


def measure(settings: Settings, findings: Findings) -> None:
    """The part of `benchmarks.gpu`."""
    folder = made_pair(settings)
    findings.add(acceptance=ACCEPTANCE, max_tokens=settings.sizes.max_tokens, prompts_per_request=settings.sizes.load)
    asyncio.run(serve(settings, findings, folder))


def made_pair(settings: Settings) -> Path:
    """The folder of both models, made if they are not there."""
    folder, done = Path(settings.scratch), Path(settings.scratch) / "made"
    if not done.exists():
        device = pick_device(settings.device)
        torch.manual_seed(0)
        follows = path_through(SHAPES[settings.target]["vocab_size"])
        save_model(folder / "target", settings.target, follows, device, settings.torch_dtype)
        its = partly_wrong(follows, 1 - ACCEPTANCE)
        save_model(folder / "draft", settings.draft, its, device, settings.torch_dtype)
        done.touch()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the workers need it
    return folder


async def serve(settings: Settings, findings: Findings, folder: Path) -> None:
    """Runs the kinds of decoding in turns, at one concurrency after the other."""
    up = UpSettings(
        port=0, log_level="warning", drain_seconds=1, prefix_caching=False, max_num_seqs=max(settings.sizes.batches),
        target=str(folder / "target"), draft=str(folder / "draft"), target_device=settings.device,
        draft_device=settings.device,
    )  # fmt: skip
    began = time.perf_counter()
    async with running(up) as address, AsyncClient(address) as client:
        findings.add(started_s=round(time.perf_counter() - began, 1))
        info = await client.model_info()
        for name, model in (("target", info.target), ("draft", info.draft)):
            findings.add(**{name: MessageToDict(model, preserving_proto_field_name=True)})
        truth: dict[str, list[int]] = {}
        for concurrency in settings.sizes.batches:
            if findings.fits(settings, f"{concurrency} at a time", ENDING):
                for row in await rows_of(client, settings, concurrency, truth):
                    findings.add_row("runs", row)


async def rows_of(client: AsyncClient, settings: Settings, concurrency: int, truth: dict[str, list[int]]) -> list[Row]:
    """A row for each kind: medians over the runs. `truth` has the answers of plain decoding so far."""
    sizes = settings.sizes
    lines = list(islice(cycle(own_prompts()), sizes.load * concurrency))
    load = Load(concurrency, lines, KINDS)
    await run(client, load, KINDS[-1], sizes.max_tokens, {})  # learns what rounds cost
    found: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for repeat in range(sizes.runs):
        if repeat and settings.seconds_left < ENDING:
            break
        for kind in KINDS:
            found[kind].append(await run(client, load, kind, sizes.max_tokens, truth))
    return [{**summary(load, kind, its, found[PLAIN]), "runs": len(its)} for kind, its in found.items()]
