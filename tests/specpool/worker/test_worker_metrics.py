"""A worker's metrics: work done, memory held, and whether it hangs."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from scraping import Scrape
from worker_service import DRAFT, Worker, held, until

from specpool.protocol.worker_info import CacheLoad, RankMemory, WorkerInfo
from specpool.worker.host import WorkerHost
from specpool.worker.metrics import WorkerMetrics


def seen(host: WorkerHost, kind: str = "target") -> Scrape:
    """The result of a scrape."""
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(kind, host))
    return Scrape.of(generate_latest(registry).decode())


def value(host: WorkerHost, name: str) -> float:
    return seen(host).value(f"specpool:worker_{name}", worker="target")


async def test_rounds_passes_and_tokens_are_counted(worker: Worker) -> None:
    names = ("rounds_total", "passes_total", "tokens_total", "forward_seconds_total", "realign_seconds_total")
    before = {name: value(worker.host, name) for name in names}
    await worker.round(worker.item(1, 0, [1, 2, 3]), worker.item(2, 0, [4, 5]))
    await worker.round(worker.item(1, 3, [6]))
    gained = {name: value(worker.host, name) - before[name] for name in names}
    assert (gained["rounds_total"], gained["passes_total"], gained["tokens_total"]) == (2, 2, 6)
    assert gained["forward_seconds_total"] > 0
    assert gained["realign_seconds_total"] > 0


async def test_draft_tokens_count_as_run(draft: Worker) -> None:
    before = value(draft.host, "tokens_total")
    request = draft.item(1, 0, [1, 2, 3])
    request.num_draft_tokens = 4
    await draft.round(request)
    assert value(draft.host, "tokens_total") - before == 3 + 3  # the last draft token is never run


async def test_slots_positions_and_streams(worker: Worker) -> None:
    stream = worker.open_stream()
    await stream.write(worker.request(worker.item(1, 0, [1, 2, 3])))
    await stream.read()
    assert value(worker.host, "streams_open") == 1
    assert (value(worker.host, "slots_used"), value(worker.host, "slots")) == (1, 3)
    assert 0 < value(worker.host, "kv_positions_used") <= value(worker.host, "kv_positions")
    await stream.done_writing()
    assert await worker.release(1) == 1
    assert value(worker.host, "slots_used") == 0
    assert value(worker.host, "kv_positions_used") == 0
    await until(lambda: value(worker.host, "streams_open") == 0)


async def test_the_model_is_described(worker: Worker) -> None:
    kind = "draft" if worker.role is DRAFT else "target"
    scrape = seen(worker.host, kind)
    (sample,) = scrape.families["specpool:worker_model_info"].samples
    info = worker.host.info
    assert sample.labels == {
        "worker": kind,
        "model_name": info.model,
        "dtype": "float32",
        "device": "cpu",
        "kv_layout": "slots",
        "equivalence": "bitwise" if info.bitwise else "numeric",
    }
    assert scrape.value("specpool:worker_memory_bytes", worker=kind, part="weights") == info.weight_bytes > 0


async def test_the_memory_of_each_rank_is_reported_if_the_model_is_sharded(target: Worker) -> None:
    assert "specpool:worker_rank_memory_bytes" not in seen(target.host).families
    ranks = RankMemory("cuda:0", 5, 6, 7), RankMemory("cuda:1", 15, 16, 17)
    info = replace(target.host.info, tensor_parallel=2, tensor_parallel_sums="whole", ranks=ranks)
    with mock.patch.object(target.host, "_info", info):
        memory = seen(target.host).families["specpool:worker_rank_memory_bytes"].samples
    assert [(sample.labels["rank"], sample.labels["part"], sample.value) for sample in memory] == [
        ("0", "weights", 5), ("0", "kv_cache", 6), ("0", "activations", 7),
        ("1", "weights", 15), ("1", "kv_cache", 16), ("1", "activations", 17),
    ]  # fmt: skip


async def test_a_carried_draft_has_samples_of_its_own_in_the_same_families(
    target: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = SimpleNamespace(realign_ns=2 * 10**9, passes=30, tokens=40, load=CacheLoad(2, 60))
    described = WorkerInfo(model="draft", slots_total=3, kv_positions_total=100, weight_bytes=7)
    backend, info = target.host.backend, replace(target.host.info, draft=described)
    counters = {"passes": 50, "tokens": 70, "realign_ns": 5 * 10**9, "draft_ns": 4 * 10**9, "carried_draft": draft}
    monkeypatch.setattr(backend, "__class__", type("Carrying", (type(backend),), counters))
    monkeypatch.setattr(target.host, "_info", info)
    await target.round(target.item(1, 0, [1, 2, 3]))
    scrape, forward_s = seen(target.host), target.host.forward_ns / 1e9
    names = ("passes_total", "tokens_total", "realign_seconds_total", "forward_seconds_total", "slots_used")
    by_worker = {
        worker: [scrape.value(f"specpool:worker_{name}", worker=worker) for name in names]
        for worker in ("target", "draft")
    }
    assert by_worker == {"target": [20, 30, 3, forward_s, 1], "draft": [30, 40, 2, 4, 2]}
    assert scrape.value("specpool:worker_kv_positions_used", worker="draft") == 40
    assert scrape.value("specpool:worker_memory_bytes", worker="draft", part="weights") == 7
    models = scrape.families["specpool:worker_model_info"].samples
    assert [(sample.labels["worker"], sample.labels["model_name"]) for sample in models] == [
        ("target", info.model), ("draft", "draft"),
    ]  # fmt: skip


async def test_a_hung_pass_and_waiting_calls_are_reported(target: Worker) -> None:
    watching = asyncio.create_task(target.host.watch(0.1, lambda hangs: None))
    with held(target) as hold:
        rounds = [asyncio.create_task(target.round(target.item(i, 0, [1, 2]))) for i in range(3)]
        await until(lambda: value(target.host, "calls_waiting") == 2)
        await until(lambda: value(target.host, "hanging") == 1)
        hold.open.set()
        await asyncio.gather(*rounds)
    await until(lambda: value(target.host, "hanging") == 0)
    assert value(target.host, "calls_waiting") == 0
    watching.cancel()


async def test_a_loading_model_has_no_metrics() -> None:
    host = WorkerHost(lambda report: None)  # type: ignore[arg-type, return-value]
    assert value(host, "loaded") == value(host, "rounds_total") == 0
    assert "specpool:worker_slots" not in seen(host).families
