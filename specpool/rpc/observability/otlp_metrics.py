"""OpenTelemetry metrics of requests, exported to an OTLP collector. Imports OpenTelemetry only on demand.

Names, units and buckets are those of OpenTelemetry's semantic conventions for generative AI servers.
"""

from typing import Any

from specpool.environment.process import package_version
from specpool.rpc.observability.otlp import configure_library_logs, flush, refusing_variables, resource_of

FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class RequestMeter:
    """Records the latencies of finished samples, and exports them every minute (`OTEL_METRIC_EXPORT_INTERVAL`)."""

    def __init__(self, service: str, endpoint: str) -> None:
        """`service`: name of the process, unless OpenTelemetry's variables set another."""
        configure_library_logs()
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        self._exporter = OTLPMetricExporter(endpoint=endpoint)
        reader = PeriodicExportingMetricReader(self._exporter)
        self._provider = MeterProvider([reader], resource_of(service), shutdown_on_exit=False)
        create = self._provider.get_meter("specpool", package_version()).create_histogram
        self._first_token = create(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time to generate the first token of successful responses.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_SECONDS,
        )
        self._per_token = create(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per token after the first one of successful responses.",
            explicit_bucket_boundaries_advisory=TOKEN_SECONDS,
        )

    def ended(self, operation: str, model: str, first_token_s: float, per_token_s: float | None) -> None:
        """Record a sample that finished by `stop` or `length`. `per_token_s`: None if it has only one token."""
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "specpool",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        self._first_token.record(first_token_s, attributes)
        if per_token_s is not None:
            self._per_token.record(per_token_s, attributes)

    async def close(self) -> None:
        """Export the last metrics, within `FLUSH_SECONDS`."""
        await flush(self._provider, self._exporter)


def request_meter(endpoint: str | None, service: str) -> RequestMeter | None:
    """The meter of a process; None without an endpoint. Raises OSError if OpenTelemetry rejects its variables."""
    if endpoint is None:
        return None
    with refusing_variables("otlp_metrics_endpoint"):
        return RequestMeter(service, endpoint)
