"""Connections from a coordinator to its workers: mutual TLS and tokens."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import OTHER_TOKEN, TOKEN, Authority, Certificate, replace
from pydantic import ValidationError
from secure_service import SecureService, coordinator, secure_service, until, worker

from coordinator.config.settings import CoordinatorSettings
from specpool.client import AsyncClient
from specpool.rpc.security.channel import Connector
from specpool.testing import FakeDraft, FakeTarget
from specpool.v1 import common_pb2, target_worker_pb2_grpc

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def certificates(ca: Authority) -> dict[str, Certificate]:
    names = ("worker", "coordinator", "client")
    return {name: ca.issue(name, ["IP:127.0.0.1", f"DNS:{name}.specpool"]) for name in names}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.workers.link.PROBE_SECONDS", 0.05)


def mutual(ca: Authority, certificate: Certificate, **more: Any) -> dict[str, Any]:
    return {"tls_ca": ca.path, **certificate.options, **more}


async def generated(service: SecureService, **security: Any) -> bool:
    """Whether a request gets the tokens of plain decoding."""
    async with AsyncClient(service.address, **security) as client:
        response = await client.generate(PROMPT, max_tokens=24)
    return list(response.token_ids) == service.target.continuation(PROMPT, 24)


async def test_mutual_tls_on_every_hop(ca: Authority, certificates: dict[str, Certificate]) -> None:
    names = {"allowed_names": ["coordinator.specpool"]}
    workers = mutual(ca, certificates["worker"], **names)
    async with secure_service(workers, **mutual(ca, certificates["coordinator"])) as service:
        await service.until_ready()
        assert await generated(service, **mutual(ca, certificates["client"]))
        # Clients of the coordinator cannot call its workers.
        target = Connector(service.links[0].address, **mutual(ca, certificates["client"]))
        async with target.open() as channel:
            stub = target_worker_pb2_grpc.TargetWorkerServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetWorkerInfo(common_pb2.GetWorkerInfoRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_workers_can_use_another_ca_and_name(
    ca: Authority, certificates: dict[str, Certificate], tmp_path: Path
) -> None:
    inner = Authority(tmp_path, "inner")
    workers = mutual(inner, inner.issue("worker", ["DNS:worker.inner"]))
    presented = inner.issue("coordinator")
    hop = {"worker_tls_ca": inner.path, "worker_tls_cert": presented.cert, "worker_tls_key": presented.key}
    async with secure_service(workers, **certificates["coordinator"].options, **hop) as service:
        await until(lambda: "UNAVAILABLE" in service.links[0].reason)
        assert not service.links[0].is_ready, "the certificate does not name the address"
    hop["worker_tls_name"] = "worker.inner"
    async with secure_service(workers, **certificates["coordinator"].options, **hop) as service:
        await service.until_ready()
        assert await generated(service, tls_ca=ca.path)


async def test_certificates_of_followed_names_are_checked(
    ca: Authority, certificates: dict[str, Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name resolves to the address of a pod, which is not in the certificate."""

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr("specpool.rpc.discovery._resolve", resolve)
    target, own = FakeTarget(), mutual(ca, certificates["coordinator"])
    presented = mutual(ca, ca.issue("drafts", ["DNS:drafts.svc"]))
    async with (
        worker(target, **mutual(ca, certificates["worker"])) as target_address,
        worker(FakeDraft(target), **presented) as draft_address,
    ):
        port = draft_address.rpartition(":")[2]
        for name, is_trusted in {"drafts.svc": True, "other.svc": False}.items():
            async with coordinator(target, target_address, f"dns:///{name}:{port}", **own) as service:
                await until(lambda: service.links[0].is_ready)
                await until(lambda: service.links[1:] and service.links[1].reason != "not connected yet")
                await until(lambda: service.links[1].is_ready or "UNAVAILABLE" in service.links[1].reason)
                assert service.links[1].is_ready == is_trusted


async def test_worker_tls_can_be_disabled(ca: Authority, certificates: dict[str, Certificate]) -> None:
    own = mutual(ca, certificates["coordinator"])
    async with secure_service({}, **own, worker_tls=False) as service:
        await service.until_ready()
        assert await generated(service, **mutual(ca, certificates["client"]))


async def test_disallowed_coordinator_reports_the_reason(ca: Authority, certificates: dict[str, Certificate]) -> None:
    workers = mutual(ca, certificates["worker"], allowed_names=["coordinator.specpool"])
    async with secure_service(workers, **mutual(ca, certificates["client"])) as service:
        await until(lambda: "PERMISSION_DENIED" in service.links[0].reason)
        assert "'client.specpool'" in service.links[0].reason
        assert not service.links[0].is_ready


async def test_worker_tokens_are_reloaded(tmp_path: Path) -> None:
    known, sent = tmp_path / "known", tmp_path / "sent"
    known.write_text(f"coordinator {TOKEN}")
    sent.write_text(OTHER_TOKEN)
    async with secure_service({"api_tokens": known}, worker_token=sent) as service:
        await until(lambda: "UNAUTHENTICATED" in service.links[0].reason)
        replace(sent, TOKEN)
        await service.until_ready()
        assert await generated(service)


async def test_workers_can_restart_with_new_certificates(
    ca: Authority, certificates: dict[str, Certificate], tmp_path: Path
) -> None:
    target = FakeTarget()
    presented, own = mutual(ca, certificates["worker"]), mutual(ca, certificates["coordinator"])
    async with worker(FakeDraft(target), **presented) as draft_address, AsyncExitStack() as before:
        target_address = await before.enter_async_context(worker(target, **presented))
        async with coordinator(target, target_address, draft_address, **own) as service:
            await service.until_ready()
            await before.aclose()
            await until(lambda: not service.links[0].is_ready)
            async with worker(target, int(target_address.rpartition(":")[2]), **mutual(ca, ca.issue("next"))):
                await service.until_ready()
                assert await generated(service, **mutual(ca, certificates["client"]))


def test_conflicting_settings_are_named(ca: Authority, certificates: dict[str, Certificate], tmp_path: Path) -> None:
    presented, missing = certificates["coordinator"], tmp_path / "missing"
    invalid: list[tuple[dict[str, Any], str]] = [
        ({"worker_tls": True}, "worker_tls: must be given with worker_tls_ca"),
        ({"worker_tls_name": "a"}, "worker_tls_name: must be given with worker_tls_ca"),
        ({"worker_tls_ca": ca.path, "worker_tls": False}, "worker_tls_ca: must be given with worker_tls, which is off"),
        ({"worker_tls_ca": ca.path, "worker_tls_cert": presented.cert}, "worker_tls_key: must be given with"),
        ({"worker_tls_ca": ca.path, "worker_tls_key": presented.key}, "worker_tls_cert: must be given with"),
        ({"worker_tls_ca": missing}, "worker_tls_ca: "),
        ({"worker_token": missing}, "worker_token: "),
    ]
    for settings, error in invalid:
        with pytest.raises(ValidationError) as caught:
            CoordinatorSettings(**settings)
        assert error in str(caught.value)


def test_worker_tls_defaults_to_the_servers_files(ca: Authority, certificates: dict[str, Certificate]) -> None:
    own, other = certificates["coordinator"], certificates["client"]
    pair = {"tls_cert": own.cert, "tls_key": own.key, "tls_name": None, "token_file": None}
    assert CoordinatorSettings().worker_security == {"token_file": None}
    assert CoordinatorSettings(**own.options).worker_security == {"token_file": None}
    by_default = CoordinatorSettings(**own.options, tls_ca=ca.path).worker_security
    assert by_default == CoordinatorSettings(**own.options, worker_tls_ca=ca.path).worker_security
    assert by_default == {"tls_ca": ca.path, **pair}
    presented = {"worker_tls_cert": other.cert, "worker_tls_key": other.key}
    configured = CoordinatorSettings(**own.options, tls_ca=ca.path, **presented).worker_security
    assert configured == by_default | {"tls_cert": other.cert, "tls_key": other.key}
