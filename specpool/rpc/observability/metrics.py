"""Prometheus metrics of every server, and a builder of metric families for collectors.

Metrics are not updated as things happen. Collectors run on the event loop during a scrape and read counters that the
code keeps anyway.
"""

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeAlias

from google.protobuf.descriptor_pool import Default as descriptor_pool
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from specpool.environment.process import package_version
from specpool.rpc.status import code_name

PREFIX = "specpool:"
NO_LABELS: Mapping[str, str] = {}
UNKNOWN_METHOD = ("unknown", "unknown")
"""Labels of unknown methods. Names that a caller invents never become labels."""

# Numbers of the status codes of calls whose handlers have set none.
CANCELLED, UNKNOWN, DEADLINE_EXCEEDED = 1, 2, 4
EARLY_SECONDS = 0.01
"""How much earlier than the server's deadline a client may end a call that expires, besides rounding."""

Values: TypeAlias = float | Mapping[Any, float]
"""One value, or values by label. Keys are tuples if there are several labels."""


class Families:
    """Builds metric families with a common prefix and common labels."""

    def __init__(self, prefix: str = PREFIX, labels: Mapping[str, str] = NO_LABELS) -> None:
        self._prefix, self._names, self._values = prefix, tuple(labels), tuple(labels.values())

    def counter(self, name: str, text: str, values: Values, *by: str) -> Metric:
        """Return a counter, whose samples are named `name` plus `_total`. `by`: names of the labels of `values`."""
        return self._filled(CounterMetricFamily(self._prefix + name, text, labels=(*self._names, *by)), values)

    def gauge(self, name: str, text: str, values: Values, *by: str) -> Metric:
        """Return a gauge. `by`: names of the labels of `values`."""
        return self._filled(GaugeMetricFamily(self._prefix + name, text, labels=(*self._names, *by)), values)

    def histogram(self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        """Return a histogram.

        `bounds`: upper bounds of all buckets but the last. `counts`: observations in each bucket, not cumulative.
        `total`: sum of all observed values.
        """
        family = HistogramMetricFamily(self._prefix + name, text, labels=self._names)
        limits = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        family.add_metric(self._values, list(zip(limits, accumulate(counts), strict=True)), total)
        return family

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
        by_label = values if isinstance(values, Mapping) else {(): values}
        for label, value in by_label.items():
            family.add_metric((*self._values, *((label,) if isinstance(label, str) else label)), value)
        return family


class CallCounter:
    """Counts calls by method and status code, and collects these counts. A stream counts once, when it ends."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._methods: dict[str, tuple[str, str]] = {}
        """Service and method by path."""

    def add_services(self, names: Iterable[str]) -> None:
        """Register services whose methods get labels of their own."""
        for name in names:
            for method in descriptor_pool().FindServiceByName(name).methods:
                self._methods[f"/{name}/{method.name}"] = (name, method.name)

    def collect(self) -> Iterable[Metric]:
        """Yield `grpc_server_handled_total`, with the labels of go-grpc-middleware."""
        text = "Calls that ended, by method and status code."
        yield Families().counter(
            "grpc_server_handled", text, dict(self._counts), "grpc_service", "grpc_method", "grpc_code"
        )

    @contextmanager
    def counted(self, path: str, context: Any) -> Iterator[None]:
        code, timeout = None, context.time_remaining()
        try:
            yield
            code = context.code()
        except Exception:
            code = context.code() or UNKNOWN
            raise
        except BaseException:  # client disconnected, or an unread stream was ended with a status
            # gRPC rounds a sent timeout up by at most 1%, so the client may end the call a little earlier.
            is_expired = timeout is not None and context.time_remaining() <= EARLY_SECONDS + timeout / 100
            code = context.code() or (DEADLINE_EXCEEDED if is_expired else CANCELLED)
            raise
        finally:
            self._counts[*self._methods.get(path, UNKNOWN_METHOD), code_name(code)] += 1


def server_registry(calls: CallCounter | None) -> CollectorRegistry:
    registry = CollectorRegistry()
    names = ("version", "python_version")
    build_info = Gauge(PREFIX + "build_info", "Version of the process; always 1.", names, registry=registry)
    build_info.labels(package_version(), platform.python_version()).set(1)
    if calls is not None:
        registry.register(calls)
    ProcessCollector(registry=registry)
    return registry
