"""Invalid trace settings and OpenTelemetry variables: each one is a single line."""

import re
import sys
from unittest import mock

import pytest

from coordinator.config.settings import CoordinatorSettings
from coordinator.server import CoordinatorServer
from specpool.environment.extras import install_command
from specpool.rpc.observability.tracing import TraceSettings, tracer_of
from specpool.worker.process import run_worker
from specpool.worker.settings import WorkerSettings


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(SystemExit) as ended:
        CoordinatorSettings.load("specpool-coordinator", ["--otlp-traces-endpoint", "http://localhost:4317"])
    assert ended.value.code == 2
    reason = f"needs opentelemetry.sdk: {install_command('otel')}"
    assert capsys.readouterr().err == f"specpool-coordinator: otlp-traces-endpoint: {reason}\n"


INVALID_ENDPOINTS = [
    "localhost:4317",
    "http://",
    "ftp://a:1",
    "http://a:b",
    "http://u:p@a:1",
    "",
    "http://a b:1",
    " http://a:1",
]


@pytest.mark.parametrize("endpoint", INVALID_ENDPOINTS)
def test_invalid_endpoints_are_rejected(endpoint: str) -> None:
    with pytest.raises(ValueError, match="must be a URL of a collector"):
        TraceSettings(otlp_traces_endpoint=endpoint)


@pytest.mark.parametrize("path", ["/v1/traces", "/?a=b", "#a"])
def test_endpoints_for_otlp_over_http_are_rejected(path: str) -> None:
    assert TraceSettings(otlp_traces_endpoint="http://a:4317/").otlp_traces_endpoint == "http://a:4317/"
    with pytest.raises(ValueError, match="must end with the port of a collector"):
        TraceSettings(otlp_traces_endpoint=f"http://a:4318{path}")


def test_trace_prompts_needs_an_endpoint() -> None:
    with pytest.raises(ValueError, match="trace_prompts needs an otlp_traces_endpoint"):
        CoordinatorSettings(trace_prompts=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zip"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "9999999"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"),
    ],
)
async def test_rejected_variables_end_the_process_with_one_line(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    reason = rf"otlp_traces_endpoint: OpenTelemetry rejects its environment variables \(.*{name}.*\): [^\n]+$"
    with pytest.raises(OSError, match=f"^{reason}"):
        CoordinatorServer(CoordinatorSettings(otlp_traces_endpoint="http://a:4317"))
    settings = WorkerSettings(otlp_traces_endpoint="http://a:4317")
    with mock.patch("specpool.worker.process.gc.freeze"), pytest.raises(SystemExit):
        run_worker("specpool-x-worker", settings, mock.Mock(), "x", mock.Mock(), mock.Mock(), ())
    assert re.match(f"specpool-x-worker: {reason}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "x"),
        ("OTEL_RESOURCE_ATTRIBUTES", "garbage"),
        ("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "none"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization: Bearer s3cret"),
    ],
)
async def test_ignored_variables_log_one_line(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    tracer = tracer_of(TraceSettings(otlp_traces_endpoint="https://127.0.0.1:1"), "x")
    assert tracer is not None
    await tracer.close()
    lines = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(lines) == 1
    assert lines[0].exc_info is None
    assert "s3cret" not in caplog.text
