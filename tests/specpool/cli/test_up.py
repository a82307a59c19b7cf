"""`specpool up` from its first moment to its end, however that comes: nothing foreign is served, nothing is left."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from certificates import TOKEN, Authority
from collector import Collector, collecting
from pydantic import ValidationError
from scraping import scrape
from serving import PATIENCE_SECONDS, info_with_loads, serving

from specpool.cli.up import UpSettings, services_of
from specpool.client import AsyncClient
from specpool.v1 import generation_pb2 as pb

Pair = tuple[Path, Path]
TRACE, CALLER = 32 * "a", 16 * "b"


@asynccontextmanager
async def started(
    *arguments: str, hangup: signal.Handlers = signal.SIG_DFL, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`specpool ...` as a process, which is gone afterwards. `hangup`: what it inherits as its handler of SIGHUP."""
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "specpool.cli.main", *arguments, env={**os.environ, **environment},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        async with asyncio.timeout(3 * PATIENCE_SECONDS):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def up(pair: Pair, *more: str) -> list[str]:
    """What to type to serve a tiny pair."""
    sizes = ["--max-model-len", "256", "--threads", "1", "--log-level", "error"]
    return ["up", "--port", "0", "--target", str(pair[0]), "--draft", str(pair[1]), *sizes, *more]


async def address_of(process: asyncio.subprocess.Process) -> str:
    """Where it serves, once it does."""
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.startswith("specpool is serving at "), line
    return line.split()[-1]


def children_of(pid: int) -> set[int]:
    """Ids of the processes that this one started and that run."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.add(int(status.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def three_free_ports() -> list[int]:
    """Three ports in a row."""
    while True:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in (first + 1, first + 2):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return [first, first + 1, first + 2]


async def until(holds: Callable[[], object]) -> None:
    """Returns as soon as it holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if holds():
                return
            await asyncio.sleep(0.05)


async def test_no_process_outlives_one_whose_terminal_hangs_up(tiny_pair: Pair) -> None:
    async with started(*up(tiny_pair, "--draft", "none", "--drain-seconds", "1")) as process:
        await address_of(process)
        await assert_all_end(process, signal.SIGHUP, 0)


async def test_one_started_with_nohup_goes_on_until_it_is_killed_and_no_process_outlives_it(tiny_pair: Pair) -> None:
    flags = ["--draft", "none", "--drain-seconds", "1"]
    async with started(*up(tiny_pair, *flags), hangup=signal.SIG_IGN) as process:
        address = await address_of(process)
        process.send_signal(signal.SIGHUP)
        async with AsyncClient(address) as client:
            assert (await client.generate("abc", max_tokens=3)).token_ids
        await assert_all_end(process, signal.SIGKILL, -signal.SIGKILL)


async def assert_all_end(process: asyncio.subprocess.Process, number: signal.Signals, status: int) -> None:
    """Asserts that this signal ends the process with this status, and then both of its children."""
    children = children_of(process.pid)
    assert len(children) == 2
    process.send_signal(number)
    _, err = await process.communicate()
    assert process.returncode == status
    assert b"Traceback" not in err
    await until(lambda: not any(map(is_running, children)))


async def test_its_flags_reach_the_processes(tiny_pair: Pair) -> None:
    flags = ["--policy", "exspec", "--kv-layout", "padded", "--max-batch-size", "3", "--num-speculative-tokens", "2"]
    ports = three_free_ports()
    flags += ["--metrics-port", str(ports[0])]
    flags += ["--log-level", "debug", "--log-format", "json", "--trace-sample-rate", "0", "--otlp-traces-endpoint"]
    async with (
        collecting() as (collector, url),
        started(*up(tiny_pair, "--drain-seconds", "1", "--max-num-seqs", "5", *flags, url)) as process,
    ):
        async with AsyncClient(await address_of(process)) as client:
            await asyncio.gather(*(client.generate("abc" * i, max_tokens=20, ignore_eos=True) for i in range(1, 6)))
            info = await info_with_loads(client.server_info)
            assert (info.policy, info.max_num_seqs) == ("exspec", 5)
            assert info.target.load.kv_layout == info.draft.load.kv_layout == "padded"
            assert len(info.counters.grouping.group_sizes) == 3
            assert (await client.model_info()).num_speculative_tokens == 2
            coordinator, target, draft = [await scrape(port) for port in ports]
            assert coordinator.value("specpool:generation_tokens_total") == 100
            for worker, its in (("target", target), ("draft", draft)):
                assert its.value("specpool:worker_slots", worker=worker) == 5
                assert its.value("specpool:worker_rounds_total", worker=worker) > 0
                service = f"specpool.v1.{worker.title()}WorkerService"
                called = {"grpc_service": service, "grpc_method": "GetWorkerInfo", "grpc_code": "OK"}
                assert its.value("specpool:grpc_server_handled_total", **called) > 0
            request = pb.GenerateRequest(
                request_id="a\nb", text="CANARY", sampling_params=pb.SamplingParams(max_tokens=12, ignore_eos=True)
            )
            request.speculative.method = pb.DRAFT_METHOD_MODEL
            plain = await client.stub.Generate(request)
            traced = await client.stub.Generate(request, metadata=(("traceparent", f"00-{TRACE}-{CALLER}-01"),))
            assert traced.token_ids == plain.token_ids
        process.terminate()
        _, err = await process.communicate()
    lines = [json.loads(line) for line in err.decode().splitlines()]
    assert sum(line["message"] == "stopped" for line in lines) == 3
    assert {line.get("trace_id") for line in lines if line.get("request_id") == "a\nb"} == {None, TRACE}
    check_trace(collector)
    assert "CANARY" not in err.decode() + collector.everything()


def check_trace(collector: Collector) -> None:
    """Asserts that there is one trace, which goes from the caller through all three processes."""
    assert {span.trace_id for span in collector.spans} == {TRACE}
    (request,) = [span for span in collector.spans if span.parent_id == CALLER]
    rounds = [span for span in collector.children(request) if span.name == "round"]
    calls = [call for round_ in rounds for call in collector.children(round_)]
    assert {call.name for call in calls} == {"propose", "verify"}
    for call in calls:
        (served,) = collector.children(call)
        assert served.service == f"specpool-{'draft' if call.name == 'propose' else 'target'}-worker"
        assert (served.name, served.kind) == (call.name, "server")
        assert served.attributes["specpool.round.id"] == call.attributes["specpool.round.id"]
        assert served.attributes["specpool.forward_s"] > 0


async def test_a_second_signal_ends_everything_at_once(tiny_pair: Pair) -> None:
    async with started(*up(tiny_pair, "--draft", "none", "--drain-seconds", "600")) as process:
        await address_of(process)
        children = children_of(process.pid)
        for child in children:
            os.kill(child, signal.SIGSTOP)  # none of them will do as it is told
        while process.returncode is None:
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.1)
        assert b"Traceback" not in await process.stderr.read()  # type: ignore[union-attr]
        await until(lambda: not any(map(is_running, children)))


async def test_a_signal_while_the_embedded_pair_is_made_leaves_nothing(tmp_path: Path) -> None:
    async with started("up", "--port", "0", XDG_CACHE_HOME=str(tmp_path)) as process:
        await until(lambda: children_of(process.pid))
        [child] = children_of(process.pid)
        process.terminate()
        _, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        assert not is_running(child)
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []


@pytest.mark.parametrize("command", ["up", "demo"])
async def test_a_port_that_another_coordinator_serves_is_refused(tiny_pair: Pair, command: str) -> None:
    async with serving() as other:
        port = other.address.rpartition(":")[2]
        async with started(command, *up(tiny_pair, "--port", port)[1:]) as process:
            out, err = await process.communicate()
        assert process.returncode == 1
        assert out == b""
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in err.decode()
        assert f"specpool {command}: the coordinator ended with status 1" in err.decode()
        assert b"starting it again" not in err
        assert (await other.stub.GetServerInfo(pb.GetServerInfoRequest())).counters.requests == 0


async def test_it_serves_at_an_ipv6_address(tiny_pair: Pair) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with started(*up(tiny_pair, "--host", "::", "--draft", "none", "--drain-seconds", "1")) as process:
        address = await address_of(process)
        assert address.startswith("[::1]:")
        async with AsyncClient(address) as client:
            assert (await client.generate("abc", max_tokens=3)).token_ids


async def test_its_coordinator_speaks_tls_and_asks_for_tokens(tiny_pair: Pair, tmp_path: Path) -> None:
    ca, tokens = Authority(tmp_path), tmp_path / "tokens"
    shown = ca.issue("up", ["DNS:up.example"])
    tokens.write_text(f"alice {TOKEN}\n")
    flags = ["--tls-cert", str(shown.cert), "--tls-key", str(shown.key), "--tls-ca", str(ca.path)]
    flags += ["--api-tokens", str(tokens), "--allowed-names", "alice,bob", "--no-reflection", "--drain-seconds", "1"]
    client: Any = {"tls_ca": ca.path, "tls_name": "up.example", "token": TOKEN}
    async with started(*up(tiny_pair, *flags)) as process:
        address = await address_of(process)
        async with AsyncClient(address, **client, **ca.issue("alice").options) as alice:
            assert (await alice.generate("abc", max_tokens=3)).token_ids
            assert (await info_with_loads(alice.server_info)).draft.state == "ready"
        async with AsyncClient(address, **client, **ca.issue("mallory").options) as mallory:
            with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                await mallory.generate("abc", max_tokens=3)
        process.terminate()
        await process.communicate()


def test_revisions_reach_the_workers() -> None:
    settings = UpSettings(target="a/b", target_revision="0123abc", draft="c/d", draft_revision="main")
    target, draft, _ = services_of(settings, "a/b", "c/d")
    assert target.arguments[-2:] == ["--revision", "0123abc"]
    assert draft.arguments[-2:] == ["--revision", "main"]
    for missing in ({"target_revision": "x"}, {"target": "a/b", "draft": "none", "draft_revision": "x"}):
        with pytest.raises(ValidationError, match=r"_revision needs a (target|draft) from the hub"):
            UpSettings(**missing)


def target_and_draft(**settings: Any) -> list[dict[str, str]]:
    """Flags of both workers, by name; each has a value."""
    workers = [service.arguments for service in services_of(UpSettings(**settings), "a", "b")[:2]]
    return [dict(zip(flags[::2], flags[1::2], strict=True)) for flags in workers]


@pytest.mark.parametrize(
    ("devices", "threads", "of_each_rank"),
    [("cuda:0,cuda:1", 8, 8), ("cpu,cpu", 8, 4), ("cpu, cpu ,cpu", 8, 2), ("cpu,cpu,cpu", 2, 1)],
)
def test_a_target_is_divided_among_devices(devices: str, threads: int, of_each_rank: int) -> None:
    target, draft = target_and_draft(target_devices=devices, draft_device="cuda:2", threads=threads)
    assert target["--device"] == devices.replace(" ", "")
    assert target["--tensor-parallel"] == str(len(devices.split(",")))
    assert (target["--threads"], draft["--threads"]) == (str(of_each_rank), str(threads))
    assert draft["--device"] == "cuda:2"
    assert "--tensor-parallel" not in draft


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_a_single_device_may_be_named_either_way(device: str) -> None:
    assert target_and_draft(target_devices=device, threads=3) == [
        {**flags, "--port": mock.ANY} for flags in target_and_draft(target_device=device, threads=3)
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target-devices", "cuda:0,cuda:1", "--target-device", "auto"], "give target_device or target_devices, not"),
        (["--target-devices", ""], "target-devices.0: String should have at least 1 character"),
        (["--target-devices", "cuda:0,,cuda:1"], "target-devices.1: String should have at least 1 character"),
        (["--target-devices", "cuda:0,cuda:1,cuda:0"], "target-devices: cuda:0 is named twice"),
        (["--target-devices", "cuda:0,cuda"], 'target-devices: "cuda" cannot be one of several devices: '),
        (["--target-devices", "cpu,cuda:1"], 'target-devices: "cpu" cannot be one of several devices: '),
    ],
)
def test_devices_that_cannot_be_those_of_a_target_are_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        UpSettings.load("specpool up", arguments)
    said = capsys.readouterr().err
    assert said.startswith(f"specpool up: {says}")
    assert said.count("\n") == 1


def test_devices_are_read_from_a_flag_a_variable_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "up.toml"
    file.write_text('target_devices = ["cpu", "cpu"]')
    assert UpSettings.load("specpool up", ["--config", str(file)]).target_devices == ("cpu", "cpu")
    assert UpSettings.load("specpool up", ["--target-devices", "cpu,cpu,cpu"]).target_devices == ("cpu",) * 3
    monkeypatch.setenv("SPECPOOL_TARGET_DEVICES", "cuda:0,cuda:1")
    assert UpSettings.load("specpool up", []).target_devices == ("cuda:0", "cuda:1")


async def test_what_cannot_be_run_is_refused_before_anything_is_started() -> None:
    limits = {"num-speculative-tokens": 16, "window-size": 4096, "threads": 1024, "drain-seconds": 86400}
    for key, most in limits.items():
        async with started("up", f"--{key}", str(most + 1)) as process:
            out, err = await process.communicate()
        assert (process.returncode, out) == (2, b"")
        assert err.decode() == f"specpool up: {key}: Input should be less than or equal to {most}\n"
