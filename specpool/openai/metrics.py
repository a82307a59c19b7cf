"""Prometheus metrics of the HTTP server."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from specpool.rpc.observability.metrics import PREFIX, server_registry

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
DISCONNECTED = 499
"""Status of a request whose client left before the answer, as in nginx."""


@dataclass
class Observed:
    """A request in progress."""

    status: int = DISCONNECTED
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.began


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()  # drop the `_created` series
        self.registry: CollectorRegistry = server_registry(None)
        name, registry = PREFIX + "http_", self.registry
        text = f"HTTP requests that ended, by route and status; {DISCONNECTED}: the client disconnected."
        self._requests = Counter(name + "requests", text, ("route", "status"), registry=registry)
        text = "Seconds from a request's arrival to the end of its response."
        self._seconds = Histogram(name + "request_seconds", text, ("route",), registry=registry, buckets=SECONDS)
        text = "Seconds from a streamed request's arrival to its first token."
        self._first = Histogram(
            name + "time_to_first_token_seconds", text, ("route",), registry=registry, buckets=SECONDS
        )
        text = "Requests in progress."
        self._in_progress = Gauge(name + "requests_in_progress", text, ("route",), registry=registry)

    @contextmanager
    def request(self, route: str) -> Iterator[Observed]:
        """Context manager of a request."""
        observed, in_progress = Observed(), self._in_progress.labels(route)
        in_progress.inc()
        try:
            yield observed
        finally:
            in_progress.dec()
            self._requests.labels(route, observed.status).inc()
            self._seconds.labels(route).observe(observed.seconds)

    def first_token(self, route: str, observed: Observed) -> None:
        self._first.labels(route).observe(observed.seconds)
