"""Simulate how often sequences of equal length can be grouped, by the size of the window.

    python -m benchmarks.grouping [--batch 8] [--k 4] [--max-window 10000] [--output FOLDER]

There is no model, and the window stays full. Each draft token is accepted with the same probability until the first
rejection. The last line printed is JSON.
"""

import argparse
import random
import time
from itertools import count
from typing import Any

from benchmarks.report import finish, output_folder, parser_of, progress, show, whole
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.capacity import QueueLimits
from coordinator.scheduling.commits import GroupingCounters
from coordinator.scheduling.grouping import POLICIES, GroupingLimits
from coordinator.scheduling.request_queue import RequestQueue
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from coordinator.scheduling.window import Window

WINDOWS = (8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10_000)
CASES = ((0.3, 4, "arrival"), (0.6, 4, "arrival"), (0.9, 4, "arrival"), (0.6, 2, "arrival"), (0.6, 4, "length"))
"""Acceptance, minimum group size, admission."""
QUEUE_PER_WINDOW = 4
PROMPT_LENGTHS, OUTPUT_LENGTHS = (20, 500), (16, 256)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=whole(1, 1024), default=8, help="maximum sequences in a round")
    parser.add_argument("--k", type=whole(0, 16), default=4, help="draft tokens per round")
    parser.add_argument("--max-window", type=whole(8, WINDOWS[-1]), default=WINDOWS[-1], help="largest window")
    parser.add_argument(
        "--rounds", type=whole(1, 10**6), default=2_000, help="rounds counted; more for a larger window"
    )
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    windows = [window for window in WINDOWS if options.batch <= window <= options.max_window]
    plan = [(*case, window) for case in CASES for window in windows]
    rows = [simulate(*case, options) for case in progress(plan, "windows")]
    show(f"exspec, batch {options.batch}, k {options.k}", rows)
    result = {"batch": options.batch, "k": options.k, "windows": rows}
    finish("grouping", result, options.output)


def simulate(
    acceptance: float, min_group: int, admission: str, size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Run rounds with a full window, and count them after a warm-up."""
    rng, ids = random.Random(0), count()
    queue = QUEUE_PER_WINDOW * size if admission == "length" else size
    requests = RequestQueue(QueueLimits(queue), by_length=admission == "length")
    window = Window(size, requests)
    policy = POLICIES["exspec"](GroupingLimits(options.batch, min_group))
    # Long enough to replace almost every sequence.
    warm_up = max(options.rounds, 4 * size)
    counters, choosing = GroupingCounters(), 0.0
    for turn in range(warm_up + max(options.rounds, 2 * size)):
        while requests.queued < queue:
            requests.submit([newcomer(next(ids), rng, options.k)])
        Admission(requests, window).admit()
        began = time.perf_counter()
        group = policy.choose(window.ready, window.rounds)
        if turn >= warm_up:
            choosing += time.perf_counter() - began
            counters.add(group, group.same_length)
        window.begin_round(group.sequences)
        for sequence in group.sequences:
            run_round(sequence, acceptance, rng)
        window.end_round(group.sequences)
        window.released(window.leaving)
    rounds, grouped = sum(counters.group_sizes), counters.same_length_rounds + counters.mixed_rounds
    grouped_sequences = sum(size * times for size, times in enumerate(counters.group_sizes, 1))
    return {
        "acceptance": acceptance,
        "min_group": min_group,
        "admission": admission,
        "window": size,
        "same_length_hit_rate": round(counters.same_length_rounds / grouped, 4) if grouped else None,
        "fallback_rate": round(counters.fallback_rounds / rounds, 4),
        "mean_group_size": round(grouped_sequences / rounds, 2),
        "choose_ms": round(choosing / rounds * 1000, 4),
    }


def newcomer(sequence_id: int, rng: random.Random, k: int) -> Sequence:
    """A sequence whose prompt is cached in both workers."""
    prompt, max_tokens = (0,) * rng.randint(*PROMPT_LENGTHS), rng.randint(*OUTPUT_LENGTHS)
    sequence = Sequence(sequence_id, GenerationRequest(str(sequence_id), prompt, max_tokens, frozenset(), k))
    sequence.target.commit(len(prompt) - 1)
    sequence.draft.commit(len(prompt) - 1)
    return sequence


def run_round(sequence: Sequence, acceptance: float, rng: random.Random) -> None:
    """Run a round of one sequence. After a full acceptance, the draft's cache lacks one more token."""
    drafted, accepted = sequence.max_num_draft_tokens, 0
    while accepted < drafted and rng.random() < acceptance:
        accepted += 1
    sequence.commit([0] * (accepted + 1))
    sequence.target.commit(len(sequence.token_ids) - 1)
    sequence.draft.commit(sequence.target.num_cached_tokens - (accepted == drafted > 0))


if __name__ == "__main__":
    main()
