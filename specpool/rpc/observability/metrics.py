"""Metrics of a process for Prometheus: those that every server has, and a builder of metric families for collectors.

No metric is updated as things happen: when a scrape asks for them, collectors on the event loop read counters that the
code keeps anyway.
"""

import platform
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor_pool import Default as descriptor_pool
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from specpool.rpc.errors import code_name
from specpool.rpc.version import package_version

PREFIX = "specpool:"
NO_LABELS: Mapping[str, str] = {}
UNKNOWN_METHOD = ("unknown", "unknown")
"""Service and method of calls to any other method: no name that a caller invents becomes a label."""

CANCELLED, UNKNOWN, DEADLINE_EXCEEDED = 1, 2, 4
"""Numbers of the status codes of calls for which the handler has set none."""

Handler: TypeAlias = Any  # grpc.RpcMethodHandler, whose stubs know no asyncio
Values: TypeAlias = float | Mapping[Any, float]
"""One value, or a mapping of label values to values; where there are several labels, its keys are tuples."""


class Families:
    """Builds metric families with one prefix and with labels that all samples share."""

    def __init__(self, prefix: str = PREFIX, labels: Mapping[str, str] = NO_LABELS) -> None:
        self._prefix, self._names, self._values = prefix, tuple(labels), tuple(labels.values())

    def counter(self, name: str, text: str, values: Values, *by: str) -> Metric:
        """A counter, whose samples are named `name` plus `_total`. `by`: the labels that tell its values apart."""
        return self._filled(CounterMetricFamily(self._prefix + name, text, labels=(*self._names, *by)), values)

    def gauge(self, name: str, text: str, values: Values, *by: str) -> Metric:
        """A gauge."""
        return self._filled(GaugeMetricFamily(self._prefix + name, text, labels=(*self._names, *by)), values)

    def histogram(self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        """A histogram. `counts`: observations of each bucket, up to its bound and above the one before; the last bucket
        is above all bounds. `total`: the sum of all observed values."""
        family = HistogramMetricFamily(self._prefix + name, text, labels=self._names)
        limits = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        family.add_metric(self._values, list(zip(limits, accumulate(counts), strict=True)), total)
        return family

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
        by_label = values if isinstance(values, Mapping) else {(): values}
        for own, value in by_label.items():
            family.add_metric((*self._values, *((own,) if isinstance(own, str) else own)), value)
        return family


class BuildInfo:
    """Collector of the versions that run here."""

    def __init__(self) -> None:
        self._labels = {"version": package_version(), "python_version": platform.python_version()}

    def collect(self) -> Iterable[Metric]:
        """`build_info`."""
        yield Families(labels=self._labels).gauge("build_info", "Version of the process; always 1.", 1)


def server_registry(calls: "CallCounter") -> CollectorRegistry:
    """A registry with the metrics of every server."""
    registry = CollectorRegistry()
    for collector in (BuildInfo(), calls):
        registry.register(collector)
    ProcessCollector(registry=registry)
    return registry


class CallCounter(grpc.aio.ServerInterceptor):
    """Counts calls by method and status code, and refused ones too if it comes before the interceptors that refuse.

    It is also the collector of these counts. A stream counts once, when it ends.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._methods: dict[str, tuple[str, str]] = {}
        """Service and method by the path of a call."""

    def add_services(self, names: Iterable[str]) -> None:
        """Notes the methods of services; calls of each are counted separately."""
        for name in names:
            for method in descriptor_pool().FindServiceByName(name).methods:
                self._methods[f"/{name}/{method.name}"] = (name, method.name)

    def collect(self) -> Iterable[Metric]:
        """`grpc_server_handled_total`, with the labels that go-grpc-middleware has."""
        text = "Calls that ended, by method and status code."
        yield Families().counter(
            "grpc_server_handled", text, dict(self._counts), "grpc_service", "grpc_method", "grpc_code"
        )

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        if handler is None:  # gRPC answers by itself
            return None
        method = self._methods.get(details.method, UNKNOWN_METHOD)
        if handler.response_streaming:

            async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
                with self._counted(method, context):
                    await handler.stream_stream(requests, context)

            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)

        async def respond(requests: AsyncIterator[bytes], context: Any) -> Any:
            with self._counted(method, context):
                return await handler.stream_unary(requests, context)

        return grpc.stream_unary_rpc_method_handler(respond, response_serializer=handler.response_serializer)

    @contextmanager
    def _counted(self, method: tuple[str, str], context: Any) -> Iterator[None]:
        """Counts a call. Handlers here read their requests as streams, whatever the method."""
        code = None
        try:
            yield
            code = context.code()
        except Exception:
            code = context.code() or UNKNOWN
            raise
        except BaseException:  # the client has left, or an unread stream was ended with a status
            left = context.time_remaining()
            code = context.code() or (DEADLINE_EXCEEDED if left is not None and left <= 0 else CANCELLED)
            raise
        finally:
            self._counts[*method, code_name(code)] += 1
