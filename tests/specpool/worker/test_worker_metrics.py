"""A worker's metrics: work done, memory held, and whether it hangs."""

import asyncio
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from own_drafts import Generation, Rounds
from prometheus_client import CollectorRegistry, generate_latest
from scraping import Scrape
from tiny_models import forget_all, load_engine
from worker_service import DRAFT, Worker, held, until

from draft_worker.proposer import Proposer
from specpool.protocol.worker_info import RankMemory
from specpool.worker.host import WorkerHost
from specpool.worker.metrics import WorkerMetrics
from target_worker.verifier import Verifier


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


async def test_the_memory_of_recurrent_states_is_reported(target: Worker) -> None:
    memory = "specpool:worker_memory_bytes"
    assert "recurrent_states" not in {each.labels["part"] for each in seen(target.host).families[memory].samples}
    with mock.patch.object(target.host, "_info", replace(target.host.info, state_bytes_total=5)):
        assert seen(target.host).value(memory, worker="target", part="recurrent_states") == 5


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


async def test_a_carried_draft_has_its_own_samples(tiny_pair: tuple[Path, Path]) -> None:
    engine, draft_engine = load_engine(tiny_pair[0]), load_engine(tiny_pair[1], exact=False)
    forget_all(engine, 3)
    forget_all(draft_engine, 2)
    host = WorkerHost(lambda report: Verifier(engine, Proposer(draft_engine)))
    await host.load()
    before = {"target": engine.passes, "draft": draft_engine.passes}
    await host.run(lambda verifier: Rounds(verifier).generate([Generation(1, (5, 6, 7))], 3))
    scrape = seen(host)
    host.close()

    def values(name: str) -> dict[str, float]:
        return {worker: scrape.value(f"specpool:worker_{name}", worker=worker) for worker in ("target", "draft")}

    assert values("passes_total") == {"target": engine.passes, "draft": draft_engine.passes}
    assert all(passes > before[worker] for worker, passes in values("passes_total").items())
    assert values("tokens_total") == {"target": engine.tokens, "draft": draft_engine.tokens}
    assert values("realign_seconds_total") == {
        "target": pytest.approx(engine.realign_ns / 1e9), "draft": draft_engine.realign_ns / 1e9,
    }  # fmt: skip
    assert values("forward_seconds_total")["draft"] > 0
    assert values("slots") == {"target": 3, "draft": 2}
    assert values("slots_used") == {"target": 1, "draft": 1}
    assert min(values("kv_positions_used").values()) > 0
    models = scrape.families["specpool:worker_model_info"].samples
    infos = [("target", engine.info().model), ("draft", draft_engine.info().model)]
    assert [(sample.labels["worker"], sample.labels["model_name"]) for sample in models] == infos


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


async def test_counters_do_not_decrease_if_a_draft_runs_during_a_scrape(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, draft_engine = load_engine(tiny_pair[0]), load_engine(tiny_pair[1], exact=False)
    host = WorkerHost(lambda report: Verifier(engine, Proposer(draft_engine)))
    await host.load()
    rising = count(draft_engine.passes)
    monkeypatch.setattr(Proposer, "passes", property(lambda proposer: next(rising)))
    assert [value(host, "passes_total") for _ in range(2)] == [engine.passes] * 2
    host.close()
