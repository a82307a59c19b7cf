"""A worker's metrics, read from its host at each scrape, even while a pass runs or hangs."""

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric

from specpool.protocol.worker_info import RankMemory, WorkerInfo
from specpool.rpc.observability.metrics import Families
from specpool.worker.backend import Backend
from specpool.worker.host import WorkerHost


class WorkerMetrics:
    """Collector. Metrics of the model and its cache appear once the model is loaded."""

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
        text = "Seconds that rounds took in the model, without realignment."
        yield counter("worker_forward_seconds", text, host.forward_ns / 1e9)
        if host.is_loaded:
            backend: Backend = host.backend
            yield counter("worker_realign_seconds", "Seconds spent on realignment.", backend.realign_ns / 1e9)
            yield counter("worker_passes", "Forward passes.", backend.passes)
            yield counter("worker_tokens", "Tokens run, including prompts and rejected drafts.", backend.tokens)
            yield from _of_model(families, host.info)


def _of_model(families: Families, info: WorkerInfo) -> Iterator[Metric]:
    gauge = families.gauge
    yield gauge("worker_slots", "Sequences that can hold a slot at a time.", info.slots_total)
    yield gauge("worker_slots_used", "Sequences that hold a slot.", info.slots_in_use)
    yield gauge("worker_kv_positions", "Positions of the KV cache.", info.kv_positions_total)
    used = info.kv_positions_total - info.kv_positions_free
    yield gauge("worker_kv_positions_used", "Positions in pages that sequences hold.", used)
    memory = {"weights": info.weight_bytes, "kv_cache": info.kv_bytes_total, "activations": info.activation_bytes}
    yield gauge(
        "worker_memory_bytes", "Memory of the weights and the KV cache, and the maximum of a pass.", memory, "part"
    )
    if info.ranks:
        yield _of_ranks(families, info.ranks)
    model = {
        "model_name": info.model,
        "dtype": info.dtype,
        "device": info.device,
        "kv_layout": info.kv_layout,
        "equivalence": "bitwise" if info.bitwise else "numeric",
    }
    yield gauge("worker_model_info", "The model and how it runs; always 1.", {tuple(model.values()): 1}, *model)


def _of_ranks(families: Families, ranks: Sequence[RankMemory]) -> Metric:
    memory: dict[tuple[str, str], float] = {}
    for number, rank in enumerate(ranks):
        parts = {"weights": rank.weight_bytes, "kv_cache": rank.kv_bytes, "activations": rank.activation_bytes}
        memory |= {(str(number), part): value for part, value in parts.items()}
    text = "Memory of each rank of a sharded model; no samples for any other model."
    return families.gauge("worker_rank_memory_bytes", text, memory, "rank", "part")
