"""The metrics port: responses, limits, and counts of calls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from certificates import TOKEN
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from scraping import Scrape, http, scrape

from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.observability.metrics_endpoint import MAX_CONNECTIONS
from specpool.rpc.ports import free_port
from specpool.rpc.server.server import Server

ENDPOINT = "specpool.rpc.observability.metrics_endpoint"
GET = "GET /metrics HTTP/1.1\r\n\r\n"


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[tuple[int, grpc.aio.Channel, Server]]:
    """Run a server without services. Yields its metrics port, a channel and the server."""
    metrics = free_port()
    server = Server(ServerSettings(metrics_port=metrics, drain_seconds=0, **changes), 2**20)
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield metrics, channel, server
    finally:
        server.stop()
        await server.wait_stopped()


@pytest.mark.parametrize("accepted", ["*/*", "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"])
async def test_scrapes_have_version_and_process_metrics(accepted: str) -> None:
    """The Accept header does not change the names."""
    async with running() as (port, _, _):
        seen = await scrape(port)
        status, fields, body = await http(port, f"GET /metrics HTTP/1.1\r\nAccept: {accepted}\r\n\r\n")
    (labels,) = seen.values("specpool:build_info")
    assert dict(labels).keys() == {"version", "python_version"}
    assert seen.value("process_resident_memory_bytes") > 2**20
    assert status == "200 OK"
    assert fields["Content-Type"].startswith("text/plain; version=0.0.4")
    assert Scrape.of(body).families.keys() == seen.families.keys()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("GET /metricsandmore HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("GET /metrics?name[]=x HTTP/1.0\r\n\r\n", "200 OK"),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 2\r\n\r\nab", "405 Method Not Allowed"),
        (b"\xff\xfe \x00 HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("x" * 2**17, "414 Request-URI Too Long"),
    ],
)
async def test_only_metrics_are_served(request_: str | bytes, status: str) -> None:
    async with running() as (port, _, _):
        assert (await http(port, request_))[0] == status


async def test_idle_clients_block_nobody() -> None:
    async with running() as (port, _, _):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS + 4)]
        for _, writer in idle[MAX_CONNECTIONS:]:
            writer.write(GET.encode())
        for _ in range(3):
            assert (await scrape(port)).families
        assert await idle[0][0].read() == b""  # the oldest one: closed
        for _, writer in idle:
            writer.close()


async def test_requests_must_arrive_in_time() -> None:
    with mock.patch(f"{ENDPOINT}.REQUEST_SECONDS", 0.05):
        async with running() as (port, _, _):
            assert await http(port, "GET /met") == ("", {}, "")


def add_collector(server: Server) -> mock.Mock:
    """Add a collector that only counts its calls."""
    collect = mock.Mock(return_value=[])
    server.registry.register(mock.Mock(spec=["collect"], collect=collect))
    return collect


@pytest.mark.parametrize(("max_seconds", "collected"), [(5.0, 1), (0.0, 3)])
async def test_responses_are_cached_for_a_limited_time(max_seconds: float, collected: int) -> None:
    with mock.patch.multiple(ENDPOINT, CACHE_FACTOR=10**9, MAX_CACHE_SECONDS=max_seconds):
        async with running() as (port, _, server):
            collect = add_collector(server)
            for _ in range(3):
                await http(port, GET)
    assert collect.call_count == collected


async def test_failing_collectors_fail_only_their_scrape(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as (port, _, server):
        add_collector(server).side_effect = [RuntimeError("broken"), []]
        assert [(await http(port, GET))[0] for _ in range(2)] == ["500 Internal Server Error", "200 OK"]
    assert "could not collect metrics" in caplog.text


async def test_used_port_is_reported_in_one_line() -> None:
    async with running() as (port, _, _):
        for host in ("127.0.0.1", "0.0.0.0"):
            server = Server(ServerSettings(drain_seconds=0, metrics_port=port, host=host), 2**20)
            with pytest.raises(OSError, match=rf"^metrics-port: cannot listen on \S+:{port}: Address already in use; "):
                await server.start()
            server.stop()
            await server.wait_stopped()


async def test_calls_are_counted_by_method_and_code() -> None:
    async with running() as (port, channel, _):
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await health.Check(health_pb2.HealthCheckRequest(service="none"))
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff")
        watch = health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        watch.cancel()
        expiring = health.Watch(health_pb2.HealthCheckRequest(), timeout=2)
        await expiring.read()  # the server counts only calls that reach it before their deadline
        with pytest.raises(grpc.aio.AioRpcError):
            await expiring.read()
        await reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(())).read()
        expected = {
            ("Check", "OK"): 1,
            ("Check", "NotFound"): 1,
            ("Check", "InvalidArgument"): 1,
            ("Watch", "Canceled"): 1,
            ("Watch", "DeadlineExceeded"): 1,
            ("ServerReflectionInfo", "OK"): 1,
        }
        async with asyncio.timeout(10):
            while counts(await scrape(port)) != expected:  # noqa: ASYNC110 - the last ones may still be ending
                await asyncio.sleep(0.01)


async def test_unknown_methods_do_not_create_labels(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {TOKEN}\n")
    async with running(api_tokens=tokens) as (port, channel, _):
        reflect = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        for method in (reflect, *(f"/made/up{number}" for number in range(20))):
            for token in ("", TOKEN):
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(method)(b"\xff", metadata=[("authorization", f"Bearer {token}")])
        assert counts(await scrape(port)).keys() - {("ServerReflectionInfo", "InvalidArgument")} == {
            ("unknown", "Unauthenticated"),
            ("unknown", "Unimplemented"),
            ("ServerReflectionInfo", "Unauthenticated"),
        }


def counts(seen: Scrape) -> dict[tuple[str, str], float]:
    """Calls by method and code."""
    calls = seen.calls()
    assert all(service.startswith("grpc.") or service == method == "unknown" for service, method, _ in calls)
    return {(method, code): count for (_, method, code), count in calls.items()}
