"""TLS, client certificates and API tokens of a server, over real sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import OTHER_TOKEN, TOKEN, Authority, Certificate, openssl, remove, replace
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from pydantic import ValidationError
from relay import relay
from secure_service import listening

from specpool import healthcheck
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.security.channel import Connector
from specpool.rpc.server.callers import client_of
from specpool.rpc.server.server import Server
from specpool.rpc.status import ANSWERED

MAX_MESSAGE_BYTES = 1000
TOO_LARGE = bytes(100 * MAX_MESSAGE_BYTES)
"""A request that fails with RESOURCE_EXHAUSTED once it is read."""
TIMEOUT_SECONDS = 10
METHODS = ("One", "Stream", "Each")


class WhoAmI:
    """Methods of all kinds that return the client's name."""

    def methods(self) -> dict[str, Any]:
        return {
            "One": grpc.unary_unary_rpc_method_handler(self.one, request_deserializer=bytes),
            "Stream": grpc.unary_stream_rpc_method_handler(self.stream, request_deserializer=bytes),
            "Each": grpc.stream_stream_rpc_method_handler(self.each, request_deserializer=bytes),
        }

    async def one(self, request: bytes, context: Any) -> bytes:
        return client_of(context).encode()

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield client_of(context).encode()

    async def each(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield client_of(context).encode()  # first: grpc loses the status of a call that ends before a write
        async for _ in requests:
            yield b""


@asynccontextmanager
async def running(**security: Any) -> AsyncIterator[str]:
    """Run a server with these settings; yield its address."""
    server, who = Server(ServerSettings(**security), MAX_MESSAGE_BYTES), WhoAmI()
    server.add("who", lambda each, to: to.add_registered_method_handlers("who", each.methods()), who)
    async with listening(server) as address:
        yield address


async def call(
    address: str, method: str = "One", request: bytes = b"", metadata: Any = None, **security: Any
) -> str | grpc.aio.AioRpcError:
    """Call on a new connection. Return the client's name, or the error."""
    options: Any = {"timeout": TIMEOUT_SECONDS, "metadata": metadata}
    async with Connector(address, **security).open() as channel:
        try:
            match method:
                case "One":
                    return (await channel.unary_unary("/who/One")(request, **options)).decode()
                case "Stream":
                    return (await channel.unary_stream("/who/Stream")(request, **options).read()).decode()
            each: Any = channel.stream_stream("/who/Each")(**options)
            client: bytes = await each.read()
            await each.write(request)
            await each.read()
            return client.decode()
        except grpc.aio.AioRpcError as error:
            return error


async def code(address: str, *arguments: Any, **options: Any) -> grpc.StatusCode | None:
    """Return the status code of a call, or None if it succeeds."""
    answer = await call(address, *arguments, **options)
    return answer.code() if isinstance(answer, grpc.aio.AioRpcError) else None


async def is_healthy(address: str, **security: Any) -> bool:
    async with Connector(address, **security).open() as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS
        )
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def reflection(address: str, **security: Any) -> list[str] | grpc.StatusCode:
    """Return the services that reflection lists, or the status code."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with Connector(address, **security).open() as channel:
        # A unary request: grpc loses the status of a call that ends before a write.
        call: Any = channel.unary_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(request, timeout=TIMEOUT_SECONDS)
        try:
            return [service.name for service in (await call.read()).list_services_response.service]
        except grpc.aio.AioRpcError:
            return await call.code()


@pytest.fixture(scope="module")
def alice(ca: Authority) -> Certificate:
    return ca.issue("alice", ["DNS:alice.example", "URI:spiffe://cluster/alice"], "Alice")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# callers\n\nalice {TOKEN}\nbob   {OTHER_TOKEN}\nbob another-token-of-bob-0\n")
    return path


# --- TLS


async def test_tls_serves_clients_that_trust_the_ca(ca: Authority, server: Certificate) -> None:
    async with running(**server.options) as address:
        for method in METHODS:
            assert await call(address, method, tls_ca=ca.path) == "ipv4:127.0.0.1"
        assert await call(f"localhost:{address.split(':')[1]}", tls_ca=ca.path) == "ipv4:127.0.0.1"
        assert await call(address, tls_ca=ca.path, tls_name="localhost") == "ipv4:127.0.0.1"


async def test_invalid_server_certificates_fail_the_handshake(
    ca: Authority, other_ca: Authority, server: Certificate
) -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE
    async with running(**server.options) as address:
        assert await code(address, tls_ca=other_ca.path) is unavailable, "wrong CA"
        assert await code(address, tls_ca=ca.path, tls_name="elsewhere.example") is unavailable, "wrong name"
        assert await code(address) is unavailable, "no TLS"
    async with running(**ca.issue("expired", days=-1).options) as address:
        assert await code(address, tls_ca=ca.path) is unavailable, "expired"
    async with running() as address:
        assert await code(address, tls_ca=ca.path) is unavailable, "the server has no TLS"


async def test_slow_handshakes_succeed(ca: Authority, server: Certificate) -> None:
    """Even if they take longer than the reconnect backoff."""
    async with running(**server.options) as address, relay(address, delay_seconds=0.2) as slow_address:
        assert await code(slow_address, tls_ca=ca.path) is None


async def test_mutual_tls_requires_a_certificate_of_the_ca(
    ca: Authority, other_ca: Authority, server: Certificate, alice: Certificate
) -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE
    async with running(**server.options, tls_ca=ca.path) as address:
        for method in METHODS:
            assert await call(address, method, tls_ca=ca.path, **alice.options) == "cert:alice.example"
        assert await code(address, tls_ca=ca.path) is unavailable, "no certificate"
        stranger = other_ca.issue("alice", ["DNS:alice.example"])
        assert await code(address, tls_ca=ca.path, **stranger.options) is unavailable, "wrong CA"
        expired = ca.issue("expired-client", days=-1)
        assert await code(address, tls_ca=ca.path, **expired.options) is unavailable, "expired"
        with pytest.raises(grpc.aio.AioRpcError):
            await is_healthy(address, tls_ca=ca.path)
        assert await is_healthy(address, tls_ca=ca.path, **alice.options)


async def test_any_name_of_a_certificate_can_be_allowed(ca: Authority, server: Certificate, alice: Certificate) -> None:
    for allowed in ("alice.example", "spiffe://cluster/alice", "Alice"):
        async with running(**server.options, tls_ca=ca.path, allowed_names=["bob", allowed]) as address:
            assert await call(address, tls_ca=ca.path, **alice.options) == f"cert:{allowed}"


async def test_disallowed_names_fail_before_the_request_is_read(
    ca: Authority, server: Certificate, alice: Certificate
) -> None:
    mallory = ca.issue("mallory", ["DNS:alice.example.mallory.example"], "alice.example2")
    async with running(**server.options, tls_ca=ca.path, allowed_names=["alice.example"]) as address:
        for method in METHODS:
            error = await call(address, method, TOO_LARGE, tls_ca=ca.path, **mallory.options)
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            assert str(error.details()).startswith("allowed_names: the certificate has none of the allowed names")
            assert ANSWERED not in (error.trailing_metadata() or ()), "it says nothing about the request"
            too_large = await code(address, method, TOO_LARGE, tls_ca=ca.path, **alice.options)
            assert too_large is grpc.StatusCode.RESOURCE_EXHAUSTED, "the request is refused once it is read"
        assert await is_healthy(address, tls_ca=ca.path, **mallory.options)
        assert await reflection(address, tls_ca=ca.path, **mallory.options) is grpc.StatusCode.PERMISSION_DENIED
        services = await reflection(address, tls_ca=ca.path, **alice.options)
        assert isinstance(services, list)
        assert "who" in services


# --- Tokens


async def test_tokens_identify_callers(ca: Authority, server: Certificate, alice: Certificate, tokens: Path) -> None:
    async with running(api_tokens=tokens) as address:
        for method in METHODS:
            assert await call(address, method, token=TOKEN) == "token:alice"
        assert (
            await call(address, token="another-token-of-bob-0") == await call(address, token=OTHER_TOKEN) == "token:bob"
        )
        assert await call(address, metadata=[("authorization", f"bearer  {TOKEN} ")]) == "token:alice"
    async with running(**server.options, tls_ca=ca.path, api_tokens=tokens) as address:
        assert await call(address, tls_ca=ca.path, **alice.options, token=TOKEN) == "token:alice"
        assert await code(address, tls_ca=ca.path, **alice.options) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["Bearer "],
        [f"Bearer {TOKEN[:-1]}"],
        [f"Bearer {TOKEN}x"],
        [f"Bearer {TOKEN} {TOKEN}"],
        [f"Basic {TOKEN}"],
        [TOKEN],
        [f"Bearer {TOKEN}", f"Bearer {TOKEN}"],
        ["Bearer " + "x" * 5000],
    ],
)
async def test_invalid_tokens_fail_before_the_request_is_read(tokens: Path, values: list[str]) -> None:
    metadata = [("authorization", value) for value in values]
    async with running(api_tokens=tokens) as address:
        for method in METHODS:
            error = await call(address, method, TOO_LARGE, metadata)
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            reason = 'must be "Bearer" and a known API token' if values else "missing; this server needs a token"
            assert error.details() == f"authorization: {reason}"
            assert ANSWERED not in (error.trailing_metadata() or ()), "it says nothing about the request"
        assert await code(address, "One", TOO_LARGE, token=TOKEN) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_needs_no_token_but_reflection_does(tokens: Path) -> None:
    async with running(api_tokens=tokens) as address:
        assert await is_healthy(address)
        assert await reflection(address) is grpc.StatusCode.UNAUTHENTICATED
        assert isinstance(await reflection(address, token=TOKEN), list)
    async with running(reflection=False) as address:
        assert await reflection(address) is grpc.StatusCode.UNIMPLEMENTED


# --- Files that change


async def test_token_files_are_reloaded_unless_invalid(
    tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sent = tmp_path / "sent"
    sent.write_text(f"{TOKEN}\n")
    async with running(api_tokens=tokens) as address, Connector(address, token_file=sent).open() as channel:
        who = channel.unary_unary("/who/One")
        assert await who(b"") == b"token:alice"
        for broken in ("alice", f"alice {OTHER_TOKEN}\nbob {OTHER_TOKEN}", "", "alice short", "\0\ud800"):
            replace(tokens, broken.encode("utf-8", "surrogatepass"))
            assert await who(b"") == b"token:alice", broken
        remove(tokens)
        assert await who(b"") == b"token:alice"
        replace(tokens, f"carol {OTHER_TOKEN}")
        assert await code(address, token=TOKEN) is grpc.StatusCode.UNAUTHENTICATED
        replace(sent, "no token at all")
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await who(b"")
        replace(sent, OTHER_TOKEN)
        assert await who(b"") == b"token:carol", "on the channel that is open"
    logged = [record.getMessage() for record in caplog.records if record.name == "specpool.rpc.security.tls"]
    assert any("line 1: must be NAME TOKEN" in text for text in logged)
    assert any("reloaded" in text for text in logged)
    assert not any(secret in record.getMessage() for record in caplog.records for secret in (TOKEN, OTHER_TOKEN))


async def test_server_certificates_are_reloaded_unless_invalid(
    ca: Authority, other_ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specpool.rpc.security.tls")
    presented = Certificate(tmp_path / "cert.pem", tmp_path / "cert.key")
    presented.copy_from(ca.issue("old"))
    new = other_ca.issue("new")
    async with running(**presented.options) as address, Connector(address, tls_ca=ca.path).open() as open_before:
        assert await open_before.unary_unary("/who/One")(b"")
        replace(presented.cert, new.cert.read_bytes())
        assert await code(address, tls_ca=ca.path) is None, "the new key is not there yet"
        assert "tls_key" in caplog.text
        replace(presented.key, "garbage")
        assert await code(address, tls_ca=ca.path) is None
        remove(presented.key)
        assert await code(address, tls_ca=ca.path) is None
        replace(presented.key, new.key.read_bytes())
        assert await code(address, tls_ca=ca.path) is grpc.StatusCode.UNAVAILABLE
        assert await code(address, tls_ca=other_ca.path) is None
        assert await open_before.unary_unary("/who/One")(b""), "open connections go on"


async def test_client_ca_is_reloaded(
    ca: Authority, other_ca: Authority, server: Certificate, alice: Certificate, tmp_path: Path
) -> None:
    trusted = tmp_path / "ca.pem"
    replace(trusted, ca.path.read_bytes())
    bob = other_ca.issue("bob", [], "bob")
    async with running(**server.options, tls_ca=trusted) as address:
        assert await code(address, tls_ca=ca.path, **bob.options) is grpc.StatusCode.UNAVAILABLE
        replace(trusted, ca.path.read_bytes() + other_ca.path.read_bytes())
        assert await call(address, tls_ca=ca.path, **bob.options) == "cert:bob"
        assert await call(address, tls_ca=ca.path, **alice.options) == "cert:alice.example"
        replace(trusted, other_ca.path.read_bytes())
        assert await code(address, tls_ca=ca.path, **alice.options) is grpc.StatusCode.UNAVAILABLE


# --- Settings


def refusal(kind: Any, **settings: Any) -> str:
    """Return the error of invalid settings."""
    with pytest.raises((ValidationError, ValueError)) as caught:
        kind(**settings)
    return str(caught.value)


def test_conflicting_settings_are_named(ca: Authority, server: Certificate, alice: Certificate, tmp_path: Path) -> None:
    garbage, missing = tmp_path / "garbage", tmp_path / "missing"
    garbage.write_text("garbage")
    cert, key = server.cert, server.key
    invalid_settings: list[tuple[dict[str, Any], str]] = [
        ({"tls_cert": cert}, "tls_key: must be given with tls_cert"),
        ({"tls_key": key}, "tls_cert: must be given with tls_key"),
        ({"tls_ca": ca.path}, "tls_ca: must be given with tls_cert"),
        ({"tls_cert": cert, "tls_key": alice.key}, "tls_key: "),
        ({"tls_cert": cert, "tls_key": garbage}, "tls_key: "),
        ({"tls_cert": garbage, "tls_key": key}, "tls_cert: "),
        ({"tls_cert": cert, "tls_key": key, "tls_ca": garbage}, "tls_ca: "),
        ({"tls_cert": missing, "tls_key": key}, "tls_cert: "),
        ({"tls_cert": cert, "tls_key": tmp_path}, "tls_key: "),
        ({"allowed_names": ("a",)}, "allowed_names: must be given with tls_ca"),
        ({"api_tokens": missing}, "api_tokens: "),
        ({"api_tokens": garbage}, "api_tokens: "),
    ]
    for settings, error in invalid_settings:
        assert error in refusal(ServerSettings, **settings)
    invalid_options: list[tuple[dict[str, Any], str]] = [
        ({"tls_cert": cert, "tls_key": key}, "tls_cert: must be given with tls_ca"),
        ({"tls_name": "a"}, "tls_name: must be given with tls_ca"),
        ({"tls_ca": ca.path, "tls_key": key}, "tls_cert: must be given with tls_key"),
        ({"token": TOKEN, "token_file": garbage}, "token: must not be given with token_file"),
        ({"token_file": garbage}, "token_file: "),
        ({"token": "short"}, "token: a token must have 16 to 1024 characters, not 5"),
        ({"token": "no white space is allowed"}, "token: "),
    ]
    for options, error in invalid_options:
        assert error in refusal(Connector, address="localhost:1", **options)


def test_encrypted_keys_are_rejected_without_a_prompt(server: Certificate, tmp_path: Path) -> None:
    encrypted = tmp_path / "encrypted.key"
    openssl("pkey", "-in", server.key, "-aes-256-cbc", "-passout", "pass:secret", "-out", encrypted)
    assert "is encrypted" in refusal(ServerSettings, tls_cert=server.cert, tls_key=encrypted)


def test_tokens_never_appear_in_errors_or_settings(tokens: Path, tmp_path: Path) -> None:
    assert TOKEN not in repr(Connector("localhost:1", token=TOKEN))
    settings = ServerSettings(api_tokens=tokens)
    assert TOKEN not in f"{settings!r} {settings.model_dump_json()}"
    for text in (f"alice {TOKEN} x", f"a {TOKEN}\nb {TOKEN}", f"alice {TOKEN}!", f"alice {TOKEN * 50}"):
        tokens.write_text(text)
        assert TOKEN not in refusal(ServerSettings, api_tokens=tokens)
    assert TOKEN not in refusal(Connector, address="localhost:1", token=f"{TOKEN}\n")


def test_allowed_names_from_flags_variables_and_files(
    ca: Authority, server: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-ca", str(ca.path)]
    assert ServerSettings.load("p", [*tls, "--allowed-names", "a, b", "--allowed-names", "c"]).allowed_names == tuple(
        "abc"
    )
    file = tmp_path / "settings.toml"
    file.write_text('allowed_names = ["a", "b"]\n')
    assert ServerSettings.load("p", [*tls, "--config", str(file)]).allowed_names == ("a", "b")
    monkeypatch.setenv("SPECPOOL_ALLOWED_NAMES", "d,e")
    assert ServerSettings.load("p", tls).allowed_names == ("d", "e")


# --- The health check command


async def test_health_check_command_supports_tls(
    ca: Authority, server: Certificate, alice: Certificate, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(**server.options, tls_ca=ca.path) as address:

        async def status(*flags: object) -> int:
            return await asyncio.to_thread(healthcheck.main, [address, *map(str, flags)])

        presented = ["--tls-cert", alice.cert, "--tls-key", alice.key]
        assert await status("--tls-ca", ca.path, *presented) == 0
        assert await status("--tls-ca", ca.path, *presented, "--tls-name", "localhost") == 0
        assert await status("--tls-ca", ca.path, *presented, "--tls-name", "elsewhere") == 1
        assert await status("--tls-ca", ca.path) == 1
        with pytest.raises(SystemExit):
            await status(*presented)
        assert "tls_cert: must be given with tls_ca" in capsys.readouterr().err
