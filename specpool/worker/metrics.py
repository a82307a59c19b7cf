"""A worker's metrics, read from its host at each scrape, even while a pass runs or hangs."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import Metric

from specpool.protocol.worker_info import ModelWork, WorkerInfo
from specpool.rpc.observability.metrics import Families
from specpool.worker.backend import Backend
from specpool.worker.host import WorkerHost


class _Model(NamedTuple):
    """Work and load of one model in the process."""

    info: WorkerInfo
    forward_ns: int
    work: ModelWork


class WorkerMetrics:
    """Collector. Metrics of the models and their caches appear once the models are loaded.

    For a carried draft, the same families have samples with the label `worker="draft"`.
    """

    def __init__(self, worker: str, host: WorkerHost) -> None:
        """`worker`: "draft" or "target"."""
        self._worker, self._host = worker, host

    def collect(self) -> Iterator[Metric]:
        host, families = self._host, Families(labels={"worker": self._worker})
        counter, gauge = families.counter, families.gauge
        yield gauge("worker_loaded", "1 once the model is loaded, else 0.", host.is_loaded)
        yield gauge("worker_hanging", "1 if the model is stuck in a forward pass, else 0.", host.hanging is not None)
        yield gauge("worker_streams_open", "Open streams of rounds.", host.streams.open)
        yield gauge("worker_calls_waiting", "Calls waiting for the model.", host.waiting)
        yield counter("worker_rounds", "Rounds served.", host.rounds)
        if host.is_loaded:
            models = self._models()
            yield from _work(models)
            yield from _caches({worker: model.info for worker, model in models.items()})

    def _models(self) -> dict[str, _Model]:
        """Return the worker's model and the carried draft, by their label `worker`."""
        host, info = self._host, self._host.info
        backend: Backend = host.backend
        models = {self._worker: _Model(info, host.forward_ns, backend.work)}
        if backend.carried_draft is not None and info.draft is not None:
            models["draft"] = _Model(info.draft, backend.draft_ns, backend.carried_draft.work)
        return models


def _work(models: Mapping[str, _Model]) -> Iterator[Metric]:
    def counter(name: str, text: str, value: Callable[[_Model], float]) -> Metric:
        values = {worker: value(model) for worker, model in models.items()}
        return Families().counter(name, text, values, "worker")

    text = "Seconds that rounds took in the model, without realignment."
    yield counter("worker_forward_seconds", text, lambda model: model.forward_ns / 1e9)
    yield counter("worker_realign_seconds", "Seconds spent on realignment.", lambda model: model.work.realign_ns / 1e9)
    yield counter("worker_passes", "Forward passes.", lambda model: model.work.passes)
    text = "Tokens run, including prompts and rejected drafts."
    yield counter("worker_tokens", text, lambda model: model.work.tokens)


def _caches(infos: Mapping[str, WorkerInfo]) -> Iterator[Metric]:
    def gauge(name: str, text: str, value: Callable[[WorkerInfo], float]) -> Metric:
        return Families().gauge(name, text, {worker: value(info) for worker, info in infos.items()}, "worker")

    yield gauge("worker_slots", "Sequences that can hold a slot at a time.", lambda info: info.slots_total)
    yield gauge("worker_slots_used", "Sequences that hold a slot.", lambda info: info.slots_in_use)
    yield gauge("worker_kv_positions", "Positions of the KV cache.", lambda info: info.kv_positions_total)
    text = "Positions in pages that sequences hold."
    yield gauge("worker_kv_positions_used", text, lambda info: info.kv_positions_total - info.kv_positions_free)
    yield from _memory(infos)
    yield _descriptions(infos)


def _memory(infos: Mapping[str, WorkerInfo]) -> Iterator[Metric]:
    memory: dict[tuple[str, str], float] = {}
    of_ranks: dict[tuple[str, str, str], float] = {}
    for worker, info in infos.items():
        parts = {"weights": info.weight_bytes, "kv_cache": info.kv_bytes_total, "activations": info.activation_bytes}
        if info.state_bytes_total:
            parts["recurrent_states"] = info.state_bytes_total
        memory |= {(worker, part): size for part, size in parts.items()}
        for number, rank in enumerate(info.ranks):
            parts = {"weights": rank.weight_bytes, "kv_cache": rank.kv_bytes, "activations": rank.activation_bytes}
            of_ranks |= {(worker, str(number), part): size for part, size in parts.items()}
    text = "Memory of the weights, KV cache and recurrent states, and the maximum of a pass."
    yield Families().gauge("worker_memory_bytes", text, memory, "worker", "part")
    if of_ranks:
        text = "Memory of each rank of a sharded model; no samples for any other model."
        yield Families().gauge("worker_rank_memory_bytes", text, of_ranks, "worker", "rank", "part")


def _descriptions(infos: Mapping[str, WorkerInfo]) -> Metric:
    names = ("worker", "model_name", "dtype", "device", "kv_layout", "equivalence")
    described = {
        (worker, info.model, info.dtype, info.device, info.kv_layout, "bitwise" if info.bitwise else "numeric"): 1.0
        for worker, info in infos.items()
    }
    return Families().gauge("worker_model_info", "The model and how it runs; always 1.", described, *names)
