"""Plain decoding of the pair's target by `generate` of transformers, in static batches."""

import statistics
from functools import partial
from itertools import cycle, islice

import torch

from benchmarks.engine import finished
from benchmarks.gpu.pair import made_pair
from benchmarks.gpu.part import Findings, Settings
from benchmarks.peers import Peers
from benchmarks.report import seconds_of
from specpool.client.prompts import own_prompts
from specpool.engine.config.devices import pick_device

# A run that may not fit into the time left is not begun.
LONGEST_RUN = 10


def measure(settings: Settings, findings: Findings) -> None:
    """The part of `benchmarks.gpu`. The library's products are not restricted in this process."""
    sizes = settings.sizes
    peers = Peers(str(made_pair(settings) / "target"), pick_device(settings.device), settings.torch_dtype)
    findings.add(max_tokens=sizes.max_tokens)
    for batch in sizes.batches:
        prompts = [line.prompt for line in islice(cycle(own_prompts()), batch)]
        peers.generate(prompts, batch, 2)
        seconds: list[float] = []
        while len(seconds) < sizes.runs and findings.fits(settings, f"a run of {batch} sequences", LONGEST_RUN):
            run = partial(peers.generate, prompts, batch, sizes.max_tokens)  # of this pair, no answer ends before
            seconds.append(seconds_of(partial(finished, run)))
        if seconds:
            each = statistics.median(seconds)
            findings.add_row("runs", {
                "sequences": batch, "runs": len(seconds), "tokens_per_s": round(batch * sizes.max_tokens / each, 1),
                "ms_a_token": round(each / sizes.max_tokens * 1000, 3),
            })  # fmt: skip
    if torch.device(settings.device).type == "cuda":
        findings.add(memory_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1))
