"""Draws scenarios from seeds.

Each seed has its own workers, settings and few kinds of faults: if all kinds were frequent, they would hide each other.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from simulator.answers import (
    ANOTHER_ROUND,
    DRAFT_GARBAGE,
    EARLIER_LIFE,
    LOST,
    OWN_DRAFT_GARBAGE,
    REPEATED,
    TARGET_GARBAGE,
)
from simulator.lookups import with_lookups
from simulator.model import EOS, ToyPair
from simulator.setup import FORGET_DRAFT, WITHDRAWN, Event, Fault, Request, Scenario, WorkerSetup

MAX_MODEL_LEN = 160
MAX_PROMPT, MAX_TOKENS = 70, 60
SPAN_SECONDS = 6.0
"""Maximum time in which events happen."""
KINDS = (
    "cut",
    "silence",
    "refuse",
    "delay",
    "crash",
    "shrink",
    "hang",
    "slow",
    "forget",
    "garbage",
    LOST,
    REPEATED,
    ANOTHER_ROUND,
    EARLIER_LIFE,
    "abort",
)
PREFIXES = tuple(tuple(range(start, start + 40)) for start in (0, 60, 120))
"""Prompts often share one of these."""


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    carrying = random.Random(f"carried drafts {seed}")
    workers = [*_canaries(random.Random(f"canaries {seed}"), _carried(carrying, _workers(rng)))]
    workers = _competing(random.Random(f"competing drafts {seed}"), workers)
    span = rng.uniform(1.0, SPAN_SECONDS)
    requests = [_request(rng, number, span) for number in range(rng.randint(4, 14))]
    events: list[Event] = [*requests, *_faults(rng, workers, requests, span), *_draft_faults(carrying, workers, span)]
    pair = ToyPair(rng.choice([0.3, 0.7, 0.9, 1.0]), rng.choice([0.0, 0.0, 0.02]))
    events = with_lookups(random.Random(f"lookups {seed}"), pair, sorted(events, key=lambda event: event.at))
    return Scenario(seed, pair, tuple(workers), _settings(rng, workers), tuple(events))


def _workers(rng: random.Random) -> Iterator[WorkerSetup]:
    slots, device = rng.choice([2, 4, 6, 8]), rng.choice(["cuda:1", "cuda:1", "cuda:0"])
    num_targets, num_drafts = rng.choice([1, 1, 2, 2, 3]), rng.choice([1, 1, 1, 2, 0])
    columns = rng.choice([slots, slots, max(1, slots // 2)]) * MAX_MODEL_LEN
    seconds = rng.choice([0.004, 0.01, 0.03])
    for index in range(num_targets):
        address = f"10.0.0.1:{index + 1}"
        yield WorkerSetup("target", address, slots, MAX_MODEL_LEN, columns, "cuda:0", seconds, seconds / 100)
    for index in range(num_drafts):
        length = rng.choice([MAX_MODEL_LEN, MAX_MODEL_LEN, MAX_MODEL_LEN // 2])
        own, cost = rng.choice([slots, slots, 2]), seconds * rng.choice([0.02, 0.1, 0.5])
        yield WorkerSetup("draft", f"10.0.0.1:{index + 11}", own, length, own * length, device, cost, cost / 50)


def _carried(rng: random.Random, workers: Iterable[WorkerSetup]) -> Iterator[WorkerSetup]:
    """Let no target, all targets or some targets carry a draft."""
    share = rng.choice([0.0, 1.0, 1.0, 0.5])
    for worker in workers:
        if worker.role == "draft" or rng.random() >= share:
            yield worker
            continue
        slots, length = rng.choice([worker.slots, worker.slots, 1]), rng.choice([MAX_MODEL_LEN, MAX_MODEL_LEN // 2])
        cost = worker.base_seconds * rng.choice([0.02, 0.1, 0.5])
        address, device = worker.address, worker.device
        draft = WorkerSetup("draft", address, slots, length, slots * length, device, cost, cost / 50)
        yield replace(worker, draft=draft)


def _canaries(rng: random.Random, workers: Iterable[WorkerSetup]) -> Iterator[WorkerSetup]:
    """Give some draft workers other weights, which may change at each restart. Add a second worker to some."""
    for worker in workers:
        if worker.role == "draft":
            yield replace(worker, weights=rng.choice([("toy",), ("toy",), ("other",), ("toy", "other")]))
            if rng.random() < 0.3:
                port = int(worker.address.rpartition(":")[2]) + 20
                yield replace(worker, address=f"10.0.0.1:{port}", weights=("another",))
        else:
            yield worker


def _competing(rng: random.Random, workers: list[WorkerSetup]) -> list[WorkerSetup]:
    """If there are several drafts, sometimes name them, and give the last one another acceptance rate."""
    drafts = [worker for worker in workers if worker.role == "draft"]
    if len(drafts) < 2 or rng.random() < 0.5:
        return workers
    workers = [replace(worker, name="current") if worker.role == "draft" else worker for worker in workers]
    at = max(i for i, worker in enumerate(workers) if worker.role == "draft")
    workers[at] = replace(workers[at], name="new", agreement=rng.choice([0.0, 0.5, 1.0]))
    return workers


def _draft_faults(rng: random.Random, workers: Sequence[WorkerSetup], span: float) -> Iterator[Fault]:
    """Faults that affect only carried drafts."""
    for index, worker in enumerate(workers):
        if worker.draft is not None:
            for _ in range(rng.choice([0, 0, 3, 20])):
                at = rng.uniform(0, span)
                name = rng.choice(["", *OWN_DRAFT_GARBAGE])
                yield Fault(at, "spoil", index, name=name) if name else Fault(at, FORGET_DRAFT, index)


def _settings(rng: random.Random, workers: list[WorkerSetup]) -> dict[str, Any]:
    has_new = any(worker.name == "new" for worker in workers)
    draft_share = rng.choice([None, "new=0.1", "new=0.5", WITHDRAWN]) if has_new else None
    return {
        "policy": rng.choice(["ragged", "ragged", "ragged", "exspec", "eqspec"]),
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_batch_size": rng.choice([2, 8, 16]),
        "overlap": rng.choice(["auto", "auto", "on", "off"]),
        "prefill_tokens": rng.choice([16, 64, 128]),
        "prefix_caching": rng.random() < 0.8,
        "admission": rng.choice(["arrival", "arrival", "length"]),
        "lookup_store_tokens": rng.choice([0, 4096]),
        "draft_share": draft_share,
        "stream_stall_seconds": 5.0,
        "target_timeout_seconds": 8.0,
        "draft_timeout_seconds": 2.0,
        "audit_share": rng.choice([None, 0.2, 1.0]),
    }


def _request(rng: random.Random, number: int, span: float) -> Request:
    prefix = rng.choice([(), *PREFIXES])
    own = tuple(rng.randrange(EOS) for _ in range(rng.randint(1, MAX_PROMPT - len(prefix))))
    if rng.random() < 0.2:  # prompt lookup finds repetitions
        own = (own * MAX_PROMPT)[: MAX_PROMPT - len(prefix)]
    n = rng.choice([1, 1, 1, 1, 2, 3])
    return Request(
        at=rng.uniform(0, span) if number else 0.0,
        name=f"request-{number}",
        prompt=prefix + own,
        max_tokens=rng.randint(1, MAX_TOKENS),
        client=rng.choice(["alice", "alice", "bob"]),
        n=n,
        seed=rng.randrange(1, 2**31) if n > 1 or rng.random() < 0.3 else 0,
        k=rng.choice([None, None, 0, 1, 2, 4, 8]),
        leaves_after=rng.uniform(0.01, 2.0) if rng.random() < 0.2 else None,
        reads_slowly=rng.choice([0.5, 3.0, 9.0]) if rng.random() < 0.1 else 0.0,
    )


def _faults(rng: random.Random, workers: list[WorkerSetup], requests: list[Request], span: float) -> Iterator[Fault]:
    kinds = rng.sample(KINDS, rng.randint(1, 5))
    for _ in range(rng.choice([10, 40, 80, 160])):
        kind, at, worker = rng.choice(kinds), rng.uniform(0, span), rng.randrange(len(workers))
        seconds = rng.choice([0.01, 0.1, 0.5]) * rng.random()
        if kind == "garbage":
            name = rng.choice(TARGET_GARBAGE if workers[worker].role == "target" else DRAFT_GARBAGE)
            yield Fault(at, "spoil", worker, number=rng.choice([1, 1, 2]), name=name)
        elif kind in (LOST, REPEATED, ANOTHER_ROUND, EARLIER_LIFE):
            yield Fault(at, "spoil", worker, name=kind)
        elif kind == "abort":
            yield Fault(at, "abort", name=rng.choice(requests).name)
        elif kind == "shrink":
            yield Fault(at, "crash", worker, seconds, number=rng.randint(1, workers[worker].slots))
        elif kind == "crash":
            yield Fault(at, "crash", worker, seconds, number=0)
        elif kind in ("silence", "hang"):
            yield Fault(at, kind, worker, seconds * rng.choice([1, 1, 1, 20]))
        else:
            yield Fault(at, kind, worker, seconds, rng.choice([1, 3, 10]))
