"""Faults of connections, found with plain sockets and TLS; and the forms of addresses."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from certificates import Authority, Certificate
from secure_service import listening
from tls_servers import tls_server

from specpool import errors
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.security.channel import Connector, check_address, split_address
from specpool.rpc.security.diagnosis import diagnose
from specpool.rpc.server.server import Server


@asynccontextmanager
async def running(**security: Any) -> AsyncIterator[str]:
    """Run a gRPC server without services; yield its address."""
    async with listening(Server(ServerSettings(port=0, **security), 1000)) as address:
        yield address


async def diagnosis(address: str, **options: Any) -> tuple[type[errors.ConnectError], str] | None:
    return await asyncio.to_thread(diagnose, Connector(address, **options))


async def test_a_proxy_without_a_backend_may_get_one(ca: Authority, server: Certificate) -> None:
    with tls_server(server) as address:
        assert await diagnosis(address, tls_ca=ca.path) is None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_servers_of_other_libraries_refuse_clients_with_an_alert(
    ca: Authority, other_ca: Authority, server: Certificate, version: ssl.TLSVersion
) -> None:
    versions = {"minimum_version": version, "maximum_version": version}
    with tls_server(server, client_ca=ca.path, **versions) as address:
        for own in ({}, other_ca.issue("client").options):
            found = await diagnosis(address, tls_ca=ca.path, **own)
            assert found is not None
            assert (found[0], "client certificate" in found[1]) == (errors.CertificateError, True)
        assert await diagnosis(address, tls_ca=ca.path, **ca.issue("client").options) is None


async def test_a_web_server_with_tls(ca: Authority, server: Certificate) -> None:
    with tls_server(server, alpn=["http/1.1"]) as address:
        reason = f"{address} is not a gRPC server: check the port"
        assert await diagnosis(address, tls_ca=ca.path) == (errors.ProtocolError, reason)


async def test_healthy_servers_have_no_fault(ca: Authority, server: Certificate) -> None:
    own = ca.issue("client")
    async with running() as address:
        assert await diagnosis(address) is None
    async with running(**server.options, tls_ca=ca.path) as address:
        assert await diagnosis(address, tls_ca=ca.path, **own.options) is None
        assert await diagnosis(address, tls_ca=ca.path, **own.options, tls_name="localhost") is None


# --- Addresses


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://localhost:50050", " is a URL: use HOST:PORT, such as localhost:50050"),
        ("HTTPS://gpu-a/path", " is a URL: use HOST:PORT, such as gpu-a:50051"),
        ("http://[::1]/", " is a URL: use HOST:PORT, such as [::1]:50051"),
        ("nonsense", " has no port: use HOST:PORT, such as nonsense:50051"),
        ("localhost:", " has no port: use HOST:PORT, such as localhost:50051"),
        ("localhost:http", " has no port: use HOST:PORT, such as "),
        ("::1", " has no port: use HOST:PORT, such as [::1]:50051"),
        ("localhost:0", ": the port must be from 1 to 65535"),
        ("localhost:65536", ": the port must be from 1 to 65535"),
        ("localhost:" + "9" * 50, ": the port must be from 1 to 65535"),
    ],
)
def test_invalid_addresses_are_refused(address: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{address}{reason}")):
        check_address(address, 50051)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("localhost:50050", ("localhost", 50050)),
        ("specpool_coordinator-0.pool.svc.cluster.local:1", ("specpool_coordinator-0.pool.svc.cluster.local", 1)),
        ("[::1]:50050", ("::1", 50050)),
        ("dns:///specpool-coordinator:50050", None),
        ("unix:/run/specpool.sock", None),
    ],
)
def test_addresses_in_all_forms_are_accepted(address: str, parts: tuple[str, int] | None) -> None:
    assert check_address(address, 50051) == address
    assert split_address(address) == parts
