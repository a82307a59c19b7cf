"""Addresses of workers: fixed entries, and DNS names whose records change."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from specpool.rpc.discovery import Discovery, Endpoint
from specpool.rpc.security.channel import SecurityOptions


@pytest.fixture(autouse=True)
def _resolve_often() -> Iterator[None]:
    with mock.patch("specpool.rpc.discovery.RESOLVE_SECONDS", 0.01):
        yield


async def test_fixed_addresses_are_yielded_once() -> None:
    discovery = Discovery(["a:1", "dns:b:2", "unix:/socket", "[::1]:3"])
    endpoints = discovery.endpoints()
    assert await anext(endpoints) == discovery.fixed == [*map(Endpoint, ["a:1", "dns:b:2", "unix:/socket", "[::1]:3"])]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(endpoints), 0.1)
    assert Discovery(["a:1"]).is_single
    assert not discovery.is_single
    assert not Discovery(["dns:///a:1"]).is_single


async def test_records_of_a_name_are_followed(caplog: pytest.LogCaptureFixture) -> None:
    records = {"one": ["10.0.0.2", "10.0.0.1", "10.0.0.1"], "two": ["::1"]}

    async def resolve(host: str, port: int) -> list[str]:
        if host not in records:
            raise OSError(f"no such name: {host}, port {port}")
        return records[host]

    endpoints = Discovery(["dns:///one:7", "10.0.0.1:7", "dns:///two:8"], resolve).endpoints()
    first, second, other = Endpoint("10.0.0.1:7"), Endpoint("10.0.0.2:7", "one"), Endpoint("[::1]:8", "two")
    assert await anext(endpoints) == [first], "without waiting for the names"
    assert {*await anext(endpoints)} == {first, second, other}, "each address once"
    records["one"] = ["10.0.0.3"]
    assert {*await anext(endpoints)} == {first, Endpoint("10.0.0.3:7", "one"), other}
    del records["two"]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert other in await anext(endpoints), "the fault may be the DNS server's"
    assert [record.getMessage() for record in caplog.records] == [
        "cannot resolve two (no such name: two, port 8); keeping 1 addresses"
    ]
    records["two"] = []
    assert other not in await anext(endpoints)


@pytest.mark.parametrize("error", [socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_AGAIN])
async def test_only_an_answer_from_dns_withdraws_servers(error: int) -> None:
    is_up = True

    async def resolve(host: str, port: int) -> list[str]:
        if not is_up:
            raise socket.gaierror(error, "no records")
        return ["10.0.0.1"]

    lasting, forgetting = (
        Discovery(["dns:///one:7"], resolve, forgets=forgets).endpoints() for forgets in (False, True)
    )
    known = [Endpoint("10.0.0.1:7", "one")]
    assert await anext(lasting) == await anext(forgetting) == known
    is_up = False
    assert await anext(lasting) == known
    assert await anext(forgetting) == (known if error == socket.EAI_AGAIN else [])


async def test_slow_resolution_keeps_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.rpc.discovery.TIMEOUT_SECONDS", 0.01)
    hangs = False

    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(3600 * hangs)
        return ["10.0.0.1"]

    endpoints = Discovery(["dns:///one:7"], resolve).endpoints()
    before = await anext(endpoints)
    hangs = True
    assert await anext(endpoints) == before


async def test_names_are_resolved_by_the_system() -> None:
    assert Endpoint("127.0.0.1:7", "localhost") in await anext(Discovery(["dns:///localhost:7"]).endpoints())


def test_certificates_have_the_dns_name() -> None:
    endpoint = Endpoint("10.0.0.1:7", "drafts.svc")
    secure, insecure = SecurityOptions(tls_ca=Path("ca")), SecurityOptions(token="t")
    assert endpoint.secured(secure)["tls_name"] == "drafts.svc"
    assert endpoint.secured(insecure) == insecure
    assert endpoint.secured(secure | SecurityOptions(tls_name="given"))["tls_name"] == "given"
    assert Endpoint("drafts.svc:7").secured(secure) == secure


async def test_entries_have_labels() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["10.0.0.1"]

    labels = {"a:1": "current", "dns:///b:2": "new"}
    discovery = Discovery(["a:1", "dns:///b:2", "c:3"], resolve, labels=labels)
    assert [endpoint.label for endpoint in discovery.fixed] == ["current", ""]
    endpoints = discovery.endpoints()
    await anext(endpoints)
    assert {each.address: each.label for each in await anext(endpoints)} == {
        "a:1": "current", "c:3": "", "10.0.0.1:2": "new"
    }  # fmt: skip
