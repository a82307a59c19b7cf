"""Measure the coordinator's cost of a round with instant fake workers, and of choosing a group."""

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence as Arguments
from contextlib import ExitStack

from benchmarks.cost.fakes import load_options, run_once, start_coordinator, start_fakes, wait_ready
from benchmarks.report import finish, progress, seconds_of, show
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.capacity import QueueLimits
from coordinator.scheduling.grouping import POLICIES, GroupingLimits, Policy
from coordinator.scheduling.request_queue import RequestQueue
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from coordinator.scheduling.window import Window
from specpool.client import AsyncClient

GOAL_ROUND_MS, GOAL_CHOICE_MS = 2.0, 1.0
PORT = 50058
WINDOW_SIZE, CHOICES = 10_000, 1_000
PROMPT_LENGTHS = 20, 2_000


def main(arguments: Arguments[str]) -> None:
    options = load_options("coordinator", __doc__, 200, arguments)
    with ExitStack() as stack:
        start_coordinator(stack, PORT, *start_fakes(stack))
        runs = asyncio.run(run_all(options))
    result: dict[str, object] = {
        "sequences": options.sequences,
        "num_speculative_tokens": options.k,
        "rounds": sum(run["rounds"] for run in runs),
        **{name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0] if name.endswith("_ms")},
        "goal_round_ms": GOAL_ROUND_MS,
        "choose_group_of_10000_ms": {name: round(measure_choice(name), 5) for name in POLICIES},
        "goal_choice_ms": GOAL_CHOICE_MS,
    }
    show("cost of the coordinator", [{"measure": name, "value": value} for name, value in result.items()])
    finish("coordinator_cost", result, None)


async def run_all(options: argparse.Namespace) -> list[dict[str, float]]:
    async with AsyncClient(f"127.0.0.1:{PORT}") as client:
        await wait_ready(client)
        await run_once(client, options)  # warms up
        return [await run_once(client, options) for _ in progress(range(options.repeats), "rounds with fake workers")]


def measure_choice(name: str) -> float:
    """Median milliseconds to choose a group of 8 and put it back, in a window of 10,000 ready sequences."""
    queue = RequestQueue(QueueLimits(WINDOW_SIZE))
    window = Window(WINDOW_SIZE, queue)
    rng = random.Random(0)
    for i in range(WINDOW_SIZE):
        prompt = (1,) * rng.randint(*PROMPT_LENGTHS)
        queue.submit([Sequence(i, GenerationRequest(str(i), prompt, 1000, frozenset(), 4))])
    Admission(queue, window).admit()
    policy = POLICIES[name](GroupingLimits(max_batch_size=8, min_group_size=4))
    return statistics.median(seconds_of(lambda: _choose(window, policy)) for _ in range(CHOICES)) * 1000


def _choose(window: Window, policy: Policy) -> None:
    group = policy.choose(window.ready, window.rounds).sequences
    window.begin_round(group)
    window.end_round(group)
