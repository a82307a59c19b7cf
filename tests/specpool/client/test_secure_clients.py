"""TLS and tokens of clients and commands, and certificate rotation under load."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import OTHER_TOKEN, TOKEN, Authority, Certificate, replace
from secure_service import SecureService, secure_service, until
from serving import PATIENCE_SECONDS

from specpool import AsyncClient, Client
from specpool.cli.main import run
from specpool.cli.preflight import health_check_security
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up_security import SecureUpSettings
from specpool.rpc.security.channel import Connector
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def alice(ca: Authority) -> Certificate:
    return ca.issue("alice")


@asynccontextmanager
async def service(**settings: Any) -> AsyncIterator[SecureService]:
    """A coordinator with these settings; its workers are not secured."""
    async with secure_service({}, worker_tls=False, **settings) as started:
        await started.until_ready()
        yield started


Generate = Callable[..., Any]


async def generate(address: str, **security: Any) -> list[int]:
    async with AsyncClient(address, 0.0, **security) as client:
        return list((await client.generate(PROMPT, max_tokens=8)).token_ids)


async def generate_blocking(address: str, **security: Any) -> list[int]:
    def answer() -> list[int]:
        with Client(address, 0.0, **security) as client:
            return list(client.generate(PROMPT, max_tokens=8).token_ids)

    return await asyncio.to_thread(answer)


CLIENTS = pytest.mark.parametrize("ask", [generate, generate_blocking])


@CLIENTS
async def test_clients_use_tls_and_tokens(
    ca: Authority, server: Certificate, alice: Certificate, tmp_path: Path, ask: Generate
) -> None:
    known, sent = tmp_path / "known", tmp_path / "sent"
    known.write_text(f"alice {TOKEN}")
    sent.write_text(TOKEN)
    mutual: Any = {"tls_ca": str(ca.path), **alice.options, "tls_name": "localhost"}
    async with service(**server.options, tls_ca=ca.path, api_tokens=known) as served:
        expected = served.target.continuation(PROMPT, 8)
        assert await ask(served.address, **mutual, token=TOKEN) == expected
        assert await ask(served.address, **mutual, token_file=sent) == expected
        for refused, code in (
            ({**mutual, "token": OTHER_TOKEN}, grpc.StatusCode.UNAUTHENTICATED),
            (mutual, grpc.StatusCode.UNAUTHENTICATED),
            ({**mutual, "token": TOKEN, "tls_name": "elsewhere"}, grpc.StatusCode.UNAVAILABLE),
            ({"tls_ca": ca.path, "token": TOKEN}, grpc.StatusCode.UNAVAILABLE),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await ask(served.address, **refused)
            assert caught.value.code() is code


SCRIPT = """
import sys
from specpool import Client, SpecpoolError
try:
    with Client(sys.argv[1], 0.0, tls_ca=sys.argv[2]) as client:
        client.generate("abc")
except SpecpoolError as error:
    print(type(error).__name__, file=sys.stderr)
"""


async def test_only_the_error_reports_an_untrusted_certificate(server: Certificate, tmp_path: Path) -> None:
    """gRPC's C core adds no line of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    async with service(**server.options) as served:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT, served.address, str(Authority(tmp_path).path), env=environment,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, err = await process.communicate()
    assert err == b"CertificateError\n"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_unusable_options_are_named(kind: Any, tmp_path: Path) -> None:
    for options, named in (({"tls_name": "a"}, "tls_name"), ({"token_file": tmp_path / "none"}, "token_file")):
        with pytest.raises(ValueError, match=named):
            kind("localhost:1", **options)
    with pytest.raises(ValueError, match="http://localhost:1 is a URL"):
        kind("http://localhost:1")
    with pytest.raises(TypeError, match="tls_certificate"):
        kind("localhost:1", tls_certificate="a")


# --- Rotation under load


@dataclass
class Rotation:
    """Certificate files of a server and its clients, with several generations of contents."""

    trusted: Path
    shown: Certificate
    own: Certificate
    authorities: list[Authority]
    generations: list[tuple[Certificate, Certificate]]

    @classmethod
    def make(cls, folder: Path) -> "Rotation":
        authorities = [Authority(folder, f"ca{i}") for i in range(3)]
        generations = [(authority.issue("server"), authority.issue("client")) for authority in authorities]
        shown = Certificate(folder / "server.pem", folder / "server.key")
        own = Certificate(folder / "client.pem", folder / "client.key")
        made = cls(folder / "trusted.pem", shown, own, authorities, generations)
        replace(made.trusted, authorities[0].path.read_bytes())
        shown.copy_from(generations[0][0])
        own.copy_from(generations[0][1])
        return made

    def steps(self, generation: int) -> list[Callable[[], None]]:
        """Steps that replace the previous generation by this one."""
        before, now = (self.authorities[number].path.read_bytes() for number in (generation - 1, generation))
        shown, own = self.generations[generation]
        return [
            lambda: replace(self.trusted, before + now),
            lambda: self.shown.copy_from(shown),
            lambda: self.own.copy_from(own),
            lambda: replace(self.trusted, now),
        ]


class Load:
    """Requests of many clients, until one fails or `ended` is set. Nothing is retried."""

    def __init__(self, served: SecureService, **security: Any) -> None:
        self.ended, self.answered = asyncio.Event(), 0
        self._connector = Connector(served.address, **security)
        self._expected = served.target.continuation(PROMPT, 40)

    async def of(self, client: AsyncClient) -> None:
        while not self.ended.is_set():
            tokens = [
                token async for message in client.stream(PROMPT, max_tokens=40) for token in message.chunk.token_ids
            ]
            response = await client.generate(PROMPT, max_tokens=40)
            assert tokens == list(response.token_ids) == self._expected
            self.answered += 1

    def of_blocking(self, client: Client) -> None:
        while not self.ended.is_set():
            assert list(client.generate(PROMPT, max_tokens=40).token_ids) == self._expected
            assert list(client.stream(PROMPT, max_tokens=40))[-1].HasField("complete")

    async def of_new_connections(self) -> None:
        while not self.ended.is_set():
            async with self._connector.open() as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=PATIENCE_SECONDS)

    async def wait_answers(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for more answers, or for a failed task."""
        enough = self.answered + 6
        await until(lambda: self.answered >= enough or any(task.done() for task in tasks))


@pytest.mark.slow
async def test_no_request_fails_while_certificates_and_ca_rotate(tmp_path: Path) -> None:
    rotation = Rotation.make(tmp_path)
    security: Any = {"tls_ca": rotation.trusted, **rotation.own.options}
    async with (
        service(**rotation.shown.options, tls_ca=rotation.trusted) as served,
        AsyncClient(served.address, 0.0, **security) as client,
    ):
        load = Load(served, **security)
        with Client(served.address, 0.0, **security) as blocking:
            tasks = [asyncio.create_task(load.of(client)) for _ in range(4)]
            tasks += [asyncio.create_task(asyncio.to_thread(load.of_blocking, blocking)) for _ in range(2)]
            tasks += [asyncio.create_task(load.of_new_connections()) for _ in range(2)]
            for step in (*rotation.steps(1), *rotation.steps(2)):
                await load.wait_answers(tasks)
                step()
            await load.wait_answers(tasks)
            load.ended.set()
            await asyncio.gather(*tasks)
            assert len(client._connections) == len(blocking._connections) == 1
        with pytest.raises(grpc.RpcError):
            await generate(served.address, tls_ca=rotation.trusted, **rotation.generations[0][1].options)


# --- Commands


async def test_generate_uses_tls_and_a_token(
    ca: Authority, server: Certificate, alice: Certificate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def specpool(*arguments: object) -> tuple[int, str, str]:
        try:
            status = await asyncio.to_thread(run, "generate", [*map(str, arguments)])
        except SystemExit as end:
            status = int(str(end.code))
        return status, *capsys.readouterr()

    known, sent = tmp_path / "known", tmp_path / "sent"
    known.write_text(f"alice {TOKEN}")
    sent.write_text(TOKEN)
    tls = ["--tls-ca", ca.path, "--tls-cert", alice.cert, "--tls-key", alice.key, "--tls-name", "localhost"]
    async with service(**server.options, tls_ca=ca.path, api_tokens=known) as served:
        command = ["abc", "--address", served.address, "--max-tokens", 5, *tls]
        status, out, err = await specpool(*command, "--token-file", sent)
        assert (status, err) == (0, "[stopped after 5 tokens: --max-tokens]\n")
        assert out
        status, out, err = await specpool(*command)
        assert (status, out) == (1, "")
        assert err.startswith("specpool generate: UNAUTHENTICATED: authorization: ")
        status, _, err = await specpool("abc", "--tls-cert", alice.cert, "--tls-key", alice.key)
        assert (status, err) == (2, "specpool generate: tls-cert: must be given with --tls-ca\n")


@pytest.mark.parametrize("alternative", [["DNS:*.specpool.example"], ["IP:192.0.2.1"], []])
async def test_up_can_check_coordinators_with_any_name(ca: Authority, tmp_path: Path, alternative: list[str]) -> None:
    named = ca.issue(f"up{len(str(alternative))}", alternative, "up.example")
    settings = SecureUpSettings(**named.options, tls_ca=ca.path)
    async with service(**named.options, tls_ca=ca.path) as served:
        assert await generate(served.address, **health_check_security(settings))


def test_up_refuses_certificates_unusable_for_health_checks(ca: Authority, server: Certificate, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    for settings, reason in (
        (SecureUpSettings(**ca.issue("expired", days=-1).options), "certificate has expired"),
        (SecureUpSettings(**server.options, tls_ca=other.path), "as a client certificate: unable to get local issuer"),
    ):
        with pytest.raises(ProcessFailedError, match=reason):
            health_check_security(settings)
    assert health_check_security(SecureUpSettings()) == {}
