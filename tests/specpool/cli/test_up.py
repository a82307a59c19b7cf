"""`specpool up` and `specpool demo` with real processes: flags reach them, and all of them end."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import TOKEN, Authority
from collector import Collector, collecting
from scraping import scrape
from serving import info_with_loads
from up_process import (
    Pair,
    address_of,
    children_of,
    end_all,
    is_running,
    pair_flags,
    plain_up,
    started,
    until,
    up_command,
)

from coordinator.workers.states import RECENT_SECONDS
from specpool.client import AsyncClient
from specpool.rpc.ports import free_port
from specpool.v1 import generation_pb2 as pb

TRACE, CALLER = 32 * "a", 16 * "b"


@pytest.mark.slow
async def test_flags_reach_all_processes(tiny_pair: Pair, tmp_path: Path) -> None:
    ca, tokens, first = Authority(tmp_path), tmp_path / "tokens", free_port(3)
    server = ca.issue("up", ["DNS:up.example"])
    tokens.write_text(f"alice {TOKEN}\n")
    flags = ["--policy", "exspec", "--kv-layout", "padded", "--max-batch-size", "3", "--num-speculative-tokens", "2"]
    flags += ["--max-num-seqs", "5", "--drain-seconds", "1", "--metrics-port", str(first)]
    flags += ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-ca", str(ca.path)]
    flags += ["--api-tokens", str(tokens), "--allowed-names", "alice,bob", "--no-reflection"]
    flags += ["--log-level", "debug", "--log-format", "json", "--trace-sample-rate", "0", "--otlp-traces-endpoint"]
    security: Any = {"tls_ca": ca.path, "tls_name": "up.example", "token": TOKEN}
    async with collecting() as (collector, url), started(*up_command(tiny_pair, *flags, url)) as process:
        address = await address_of(process)
        async with AsyncClient(address, **security, **ca.issue("mallory").options) as mallory:
            with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                await mallory.generate("abc", max_tokens=3)
        async with AsyncClient(address, **security, **ca.issue("alice").options) as client:
            await info_with_loads(client.server_info)  # the draft worker is connected
            await asyncio.gather(*(client.generate("abc" * i, max_tokens=20, ignore_eos=True) for i in range(1, 6)))
            await asyncio.sleep(2 * RECENT_SECONDS)  # until the answer from before is no longer reused
            info = await info_with_loads(client.server_info)
            assert (info.policy, info.max_num_seqs, info.draft.state) == ("exspec", 5, "ready")
            assert info.target.load.kv_layout == info.draft.load.kv_layout == "padded"
            assert len(info.counters.grouping.group_sizes) == 3
            assert (await client.model_info()).num_speculative_tokens == 2
            await check_metrics(first)
            request = pb.GenerateRequest(
                request_id="a\nb", text="CANARY", sampling_params=pb.SamplingParams(max_tokens=12, ignore_eos=True)
            )
            request.speculative.method = pb.DRAFT_METHOD_MODEL
            metadata = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
            plain = await client.stub.Generate(request)
            traced = await client.stub.Generate(request, metadata=metadata)
            assert traced.token_ids == plain.token_ids
        err = await end_all(process, signal.SIGHUP, 0, children=3)
    lines = [json.loads(line) for line in err.splitlines()]
    assert sum(line["message"] == "stopped" for line in lines) == 3
    assert {line["process"] for line in lines} - {"up"} == {"coordinator", "draft-worker", "target-worker"}
    assert {line["level"] for line in lines} <= {"DEBUG", "INFO"}
    assert {line.get("trace_id") for line in lines if line.get("request_id") == "a\nb"} == {None, TRACE}
    check_trace(collector)
    assert "CANARY" not in err + collector.everything()


async def check_metrics(first: int) -> None:
    coordinator, target, draft = [await scrape(port) for port in range(first, first + 3)]
    assert coordinator.value("specpool:generation_tokens_total") == 100
    for worker, metrics in (("target", target), ("draft", draft)):
        assert metrics.value("specpool:worker_slots", worker=worker) == 5
        assert metrics.value("specpool:worker_rounds_total", worker=worker) > 0
        service = f"specpool.v1.{worker.title()}WorkerService"
        call = {"grpc_service": service, "grpc_method": "GetWorkerInfo", "grpc_code": "OK"}
        assert metrics.value("specpool:grpc_server_handled_total", **call) > 0


def check_trace(collector: Collector) -> None:
    """Assert that one trace leads from the caller through all three processes."""
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


@pytest.mark.slow
async def test_demo_compares_plain_and_speculative_tokens(tiny_pair: Pair) -> None:
    flags = ["--num-prompts", "2", "--max-tokens", "8", "--repeats", "1", "--json"]
    async with started("demo", *pair_flags(tiny_pair, *flags)) as process:
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    result = json.loads(out)
    assert (result["prompts"], result["exact_match"], result["equivalence"]) == (2, 1.0, "bitwise")
    assert 1 <= result["tokens_per_round"] <= max(1, result["mean_acceptance_length"])
    assert result["target_activations"] == "float32"


NO_TORCH = {
    "__init__.py": "raise SystemExit('torch was imported')",
    "version.py": "__version__, cuda, hip = '1', '', ''",
}


@pytest.mark.parametrize(
    ("command", "flags", "reason"),
    [
        ("demo", ["--port", "{port}"], "port: cannot listen on 127.0.0.1:{port}: Address already in use"),
        ("up", ["--target-device", "cuda:9"], "target-device: cuda:9 cannot be used: torch 1 was built without"),
        ("up", ["--target", "no/model"], "target: no/model is neither a local file or folder nor cached, and 127.0."),
    ],
)
async def test_wrong_settings_end_with_one_line_before_torch_is_imported(
    tiny_pair: Pair, tmp_path: Path, command: str, flags: list[str], reason: str
) -> None:
    (tmp_path / "torch").mkdir()
    for name, text in NO_TORCH.items():
        (tmp_path / "torch" / name).write_text(text)
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "", "HF_HOME": str(tmp_path)}
    environment["SPECPOOL_HTTP_PORT"] = "0"
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = {"port": other.getsockname()[1], "folder": tmp_path}
        given = [flag.format(**words) for flag in flags]
        async with started(command, *pair_flags(tiny_pair, *given), **environment) as process:
            out, err = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    [line] = err.decode().strip().splitlines()
    assert line.startswith(f"specpool {command}: {reason.format(**words)}")


@pytest.mark.slow
async def test_up_repeats_the_reason_of_a_process_that_fails(tiny_pair: Pair, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_pair[0] / name).read_bytes())
    flags = ["--target", str(tmp_path), "--draft", "none", "--log-level", "info", "--log-format", "json"]
    async with started(*up_command(tiny_pair, *flags)) as process:
        out, err = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    *log, last = err.decode().splitlines()
    assert last.startswith(f"specpool up: target worker: {tmp_path} cannot be loaded: it has no model.safetensors")
    assert "stopped" not in err.decode()
    assert "draining" not in err.decode()
    assert "Traceback" not in err.decode()
    assert {json.loads(line)["process"] for line in log} == {"coordinator", "target-worker"}


@pytest.mark.slow
async def test_a_model_that_the_coordinator_refuses_ends_all_processes(tiny_pair: Pair, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_pair[0], tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% broken")
    async with started("demo", *pair_flags((folder, folder), "--draft", "none")) as process:
        out, err = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    reason = f"coordinator: {folder} has an unusable tokenizer: the chat template"
    assert err.decode().splitlines()[-1].startswith(f"specpool demo: {reason}")
    assert "Traceback" not in err.decode()


@pytest.mark.slow
async def test_sighup_is_ignored_under_nohup_and_children_die_with_the_parent(tiny_pair: Pair) -> None:
    async with started(*plain_up(tiny_pair), sighup=signal.SIG_IGN) as process:
        address = await address_of(process)
        process.send_signal(signal.SIGHUP)
        async with AsyncClient(address) as client:
            assert (await client.generate("abc", max_tokens=3)).token_ids
        await end_all(process, signal.SIGKILL, -signal.SIGKILL)


@pytest.mark.slow
async def test_a_second_signal_ends_everything_at_once(tiny_pair: Pair) -> None:
    async with started(*plain_up(tiny_pair, "--drain-seconds", "600")) as process:
        await address_of(process)
        children = children_of(process.pid)
        for child in children:
            os.kill(child, signal.SIGSTOP)  # none of them can react
        while process.returncode is None:
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.1)
        assert b"Traceback" not in await process.stderr.read()  # type: ignore[union-attr]
        await until(lambda: not any(map(is_running, children)))


def downloads(folder: Path) -> list[Path]:
    """Running processes of pip that download to this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found += [process] if str(folder) in process.read_text() else []
    return found


@pytest.mark.slow
async def test_a_signal_while_the_pair_is_downloaded_ends_all_processes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # it never answers
        environment = {
            "XDG_CACHE_HOME": str(tmp_path), "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}",
            "PIP_CONFIG_FILE": os.devnull,
        }  # fmt: skip
        port = str(free_port())
        async with (
            started("up", "--port", port, "--http-port", "0", "--log-level", "error", **environment) as process,
            AsyncClient(f"127.0.0.1:{port}") as client,
        ):
            phases: set[str] = set()
            while "waiting for another process to create the embedded pair" not in phases:
                with contextlib.suppress(grpc.aio.AioRpcError):  # it does not listen yet
                    info = await client.server_info()
                    phases = {info.target.reason, info.draft.reason}
                await asyncio.sleep(0.05)
            await until(lambda: downloads(tmp_path))
            process.terminate()
            _, err = await process.communicate()
            assert (process.returncode, err) == (0, b"")
        await until(lambda: not downloads(tmp_path))


@pytest.mark.slow
async def test_one_worker_serves_both_models(tiny_pair: Pair) -> None:
    async with started(*up_command(tiny_pair, "--no-separate", "--drain-seconds", "1")) as process:
        async with AsyncClient(await address_of(process)) as client:
            response = await client.generate("abc", max_tokens=20, ignore_eos=True, num_speculative_tokens=2)
        assert response.speculative_decoding.num_draft_tokens > 0
        assert await end_all(process, signal.SIGTERM, 0) == ""


@pytest.mark.slow
async def test_up_serves_ipv6(tiny_pair: Pair) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with started(*plain_up(tiny_pair, "--host", "::")) as process:
        address = await address_of(process)
        assert address.startswith("[::1]:")
        async with AsyncClient(address) as client:
            assert (await client.generate("abc", max_tokens=3)).token_ids
