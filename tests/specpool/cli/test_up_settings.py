"""Settings of `specpool up`, and the process flags derived from them."""

import re
import socket
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from certificates import Authority
from pydantic import ValidationError

from specpool.cli.preflight import check_services
from specpool.cli.processes import ProcessFailedError, Service
from specpool.cli.up import models_of, services_of
from specpool.cli.up_http import http_services
from specpool.cli.up_security import SecureUpSettings
from specpool.cli.up_settings import UpSettings
from specpool.engine.config.target_options import TargetOptions
from specpool.rpc.ports import free_port


def worker_flags(**settings: Any) -> list[dict[str, str]]:
    """Flags of both workers by name."""
    workers = [service.arguments for service in services_of(UpSettings(**settings), "a", "b")[:2]]
    return [dict(zip(flags[::2], flags[1::2], strict=True)) for flags in workers]


def test_revisions_reach_the_workers() -> None:
    target, draft = worker_flags(target="a/b", target_revision="0123abc", draft="c/d", draft_revision="main")
    assert (target["--revision"], draft["--revision"]) == ("0123abc", "main")
    for missing in ({"target_revision": "x"}, {"target": "a/b", "draft": "none", "draft_revision": "x"}):
        with pytest.raises(ValidationError, match=r"_revision needs a (target|draft) from the hub"):
            UpSettings(**missing)


def test_drafts_know_their_target() -> None:
    """An EAGLE head borrows the embeddings."""
    target, draft = worker_flags()
    assert draft["--target-model"] == target["--model"] == "a"
    assert "--target-model" not in target


def test_mtp_layers_come_from_the_revision_of_the_target() -> None:
    settings = UpSettings(target="a/b", target_revision="0123abc", draft="mtp", separate=True)
    target, draft, _ = services_of(settings, *models_of(settings))
    expected = {"model": "mtp", "target_model": "a/b", "revision": "0123abc"}
    assert {name: draft.settings[name] for name in expected} == expected
    carried = TargetOptions(model="a/b", revision="0123abc", draft="mtp").draft_options
    assert carried is not None
    assert {name: getattr(carried, name) for name in expected} == expected
    assert "draft" not in target.settings


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"target_activations": "int8", "target_weights": "float32"},
            "target-activations: int8 needs --target-weights",
        ),
        ({"target_activations": "int8", "target_device": "cuda"}, "target-activations: int8 needs --target-device cpu"),
        ({"target_activations": "int8", "target_devices": "cuda:0,cuda:1"}, "int8 needs --target-devices cpu"),
        ({"draft_activations": "int8", "draft_device": "cuda:1"}, "draft-activations: int8 needs --draft-device cpu"),
        (
            {"target_activations": "int8", "standby": True, "standby_devices": "cuda:1"},
            "target-activations: int8 needs --standby-devices cpu; set target-activations to auto or float32",
        ),
    ],
)
def test_int8_activations_with_conflicting_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        UpSettings(**settings)


@pytest.mark.parametrize(
    ("devices", "threads", "threads_per_rank"),
    [("cuda:0,cuda:1", 8, 8), ("cpu,cpu", 8, 4), ("cpu, cpu ,cpu", 8, 2), ("cpu,cpu,cpu", 2, 1)],
)
def test_a_target_can_be_sharded(devices: str, threads: int, threads_per_rank: int) -> None:
    target, draft = worker_flags(target_devices=devices, draft_device="cuda:2", threads=threads)
    assert target["--device"] == devices.replace(" ", "")
    assert target["--tensor-parallel"] == str(len(devices.split(",")))
    assert (target["--threads"], draft["--threads"]) == (str(threads_per_rank), str(threads))
    assert draft["--device"] == "cuda:2"
    assert "--tensor-parallel" not in draft


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--target-devices", "cuda:0,cuda:1", "--target-device", "auto"],
            "give --target-device, which places each target, or --target-devices, which shards a single one, not both",
        ),
        (["--target-devices", ""], "target-devices.0: must not be empty"),
        (["--target-devices", "cuda:0,,cuda:1"], "target-devices.1: must not be empty"),
        (["--target-devices", "cuda:0,cuda:1,cuda:0"], "target-devices: duplicate device cuda:0"),
        (["--target-devices", "cuda:0,cuda"], 'target-devices: "cuda" cannot be one of several devices: '),
        (["--target-devices", "cpu,cuda:1"], 'target-devices: "cpu" cannot be one of several devices: '),
        (["--num-speculative-tokens", "17"], "num-speculative-tokens: Input should be less than or equal to 16"),
        (["--max-num-seqs", "4097"], "max-num-seqs: Input should be less than or equal to 4096"),
        (["--threads", "1025"], "threads: Input should be less than or equal to 1024"),
        (["--drain-seconds", "86401"], "drain-seconds: Input should be less than or equal to 86400"),
        (["--standby-devices", "cuda:1"], "--standby-devices needs --standby"),
        (["--standby", "--standby-devices", "cpu,cpu"], "--standby-devices must be as many as the target's devices"),
        (["--targets", "0"], "targets: Input should be greater than or equal to 1"),
        (["--targets", "2", "--standby"], "--standby needs a single target"),
        (
            ["--targets", "2", "--target-devices", "cpu,cpu"],
            "--target-devices shards a single target; to place several, give --target-device",
        ),
        (
            ["--target-device", "cuda:0,cuda:1"],
            "--target-device lists 2 devices: give --targets 2 for one on each, or --target-devices to shard a single",
        ),
        (["--draft-device", "cpu,cuda:1"], "--draft-device lists 2 devices: give --drafts 2\n"),
        (["--drafts", "2", "--draft", "none"], "--drafts needs a draft"),
        (
            ["--draft-kv-memory", "1GiB", "--draft-memory-limit", "2GiB"],
            "give --draft-kv-memory or --draft-memory-limit, not both",
        ),
        (["--drafts", "2", "--target", "a"], "--drafts needs a draft"),
        (["--target", "mtp"], "target: mtp is a draft"),
        (
            ["--target", "a", "--draft", "mtp", "--draft-revision", "b"],
            "--draft-revision needs a draft from the hub",
        ),
        (["--draft-canary", "b", "--draft", "none"], "--draft-canary needs a draft"),
        (["--draft-share", "canary=1"], "--draft-share needs --draft-canary"),
        (["--draft-canary", "b", "--draft-share", "new=1"], "draft-share: the drafts are named current and canary"),
        (["--draft-canary", "b", "--draft-share", "0.1"], "draft-share: 0.1 is not NAME=SHARE"),
        (["--record-share", "0.1"], "--record-share needs --record"),
        (["--metrics-port", "65532", "--draft-canary", "b"], "--metrics-port leaves no ports for the 4 workers"),
        (
            ["--port", "9105", "--metrics-port", "9100", "--targets", "3"],
            "--port must not be --metrics-port or one of",
        ),
        (["--metrics-port", "65530", "--drafts", "5"], "--metrics-port leaves no ports for the 7 workers"),
        (["--max-model-len", "15"], "max-model-len: Input should be greater than or equal to 16"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        UpSettings.load("specpool up", arguments)
    printed = capsys.readouterr().err
    assert printed.startswith(f"specpool up: {message}")
    assert printed.count("\n") == 1


def test_devices_come_from_a_flag_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "up.toml"
    file.write_text('target_devices = ["cpu", "cpu"]')
    assert UpSettings.load("specpool up", ["--config", str(file)]).target_devices == ("cpu", "cpu")
    assert UpSettings.load("specpool up", ["--target-devices", "cpu,cpu,cpu"]).target_devices == ("cpu",) * 3
    monkeypatch.setenv("SPECPOOL_TARGET_DEVICES", "cuda:0,cuda:1")
    assert UpSettings.load("specpool up", []).target_devices == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("settings", "name"),
    [({}, "SmolLM2-135M-Instruct"), ({"target": "a"}, None), ({"served_model_name": "mine"}, "mine")],
)
def test_the_coordinator_gets_a_readable_model_name(settings: dict[str, Any], name: str | None) -> None:
    arguments = services_of(UpSettings(**settings), "/cache/target", "/cache/draft")[-1].arguments
    given = dict(pairwise(arguments)).get("--served-model-name")
    assert given == name


def test_a_standby_has_the_flags_of_the_target_except_its_own_ports() -> None:
    settings = UpSettings(
        standby=True, target_device="cpu", target_kv_memory=2**30, draft_kv_memory=2**20, metrics_port=9100
    )
    target, draft, standby, coordinator = services_of(settings, "a", "b")
    flags = [dict(zip(each.arguments[::2], each.arguments[1::2], strict=True)) for each in (target, standby)]
    own = {"--port": mock.ANY, "--metrics-port": "9103", "--log-name": "standby-worker"}
    assert flags[1] == {**flags[0], **own}
    assert flags[0]["--kv-memory"] == str(2**30)
    assert dict(pairwise(draft.arguments))["--kv-memory"] == str(2**20)
    addresses = dict(zip(coordinator.arguments, coordinator.arguments[1:], strict=False))
    assert addresses["--target-address"] == target.address
    assert addresses["--target-standby-address"] == standby.address != target.address
    assert "--target-standby-address" not in services_of(UpSettings(), "a", "b")[-1].arguments


@pytest.mark.usefixtures("cuda_driver")
@pytest.mark.parametrize(
    ("target", "standby", "kv_memory", "refused"),
    [
        ("cuda:0", (), None, True),
        ("cuda:0", ("cuda:0",), None, True),
        ("cuda:0", (), 2**30, False),
        ("cuda:0", ("cuda:1",), None, False),
        ("auto", (), None, True),
        ("cpu", (), None, False),
    ],
)
def test_target_and_standby_on_one_gpu_need_the_size_of_their_caches(
    target: str, standby: tuple[str, ...], kv_memory: int | None, refused: bool, tiny_pair: tuple[Path, Path]
) -> None:
    model = str(tiny_pair[0])
    settings = UpSettings(
        target=model, draft="none", target_device=target, standby=True, standby_devices=standby,
        target_kv_memory=kv_memory,
    )  # fmt: skip
    with pytest.raises(ProcessFailedError, match=r"^target-kv-memory: must be given") if refused else nullcontext():
        check_services(services_of(settings, model, None))


GIB = 2**30


@pytest.mark.usefixtures("cuda_driver")
@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({}, "target-kv-memory: must be given, since target and draft share cuda:0 .*; or give --draft-device"),
        ({"target_kv_memory": GIB}, "draft-kv-memory: must be given, since target and draft share cuda:0 "),
        ({"draft_kv_memory": GIB}, "target-kv-memory: must be given, since target and draft share cuda:0 "),
        ({"target_device": "cuda", "draft_device": "cuda:0"}, "target-kv-memory: must be given"),
        ({"target_devices": "cuda:0,cuda:1", "draft_device": "cuda:1"}, "target-kv-memory: .* share cuda:1 "),
        ({"target_kv_memory": GIB, "draft_kv_memory": GIB}, None),
        ({"target_memory_limit": GIB, "draft_kv_memory": GIB}, None),
        ({"draft_device": "cuda:1"}, None),
        ({"draft_device": "cpu"}, None),
        ({"target_device": "cpu", "drafts": 2}, "draft-kv-memory: must be given, since drafts share cuda:0 "),
        (
            {"draft_device": "cuda:1", "standby": True, "standby_devices": "cuda:1", "target_kv_memory": GIB},
            "draft-kv-memory: must be given, since draft and standby share cuda:1 .*; or give --standby-devices",
        ),
    ],
)
def test_workers_on_one_gpu_need_cache_sizes(
    settings: dict[str, Any], refusal: str | None, tiny_pair: tuple[Path, Path]
) -> None:
    target, draft = map(str, tiny_pair)
    services = services_of(UpSettings(target=target, draft=draft, separate=True, **settings), target, draft)
    with pytest.raises(ProcessFailedError, match=f"^{refusal}") if refusal else nullcontext():
        check_services(services)


# --- Carried drafts


@pytest.mark.usefixtures("cuda_driver")
@pytest.mark.parametrize(
    ("settings", "is_colocated"),
    [
        ({}, True),
        ({"target_device": "cuda:1"}, True),
        ({"target_device": "cuda", "draft_device": "cuda:0"}, True),
        ({"target_devices": "cuda:0,cuda:1"}, True),
        ({"targets": 2, "target_device": "cuda:0,cuda:1"}, True),
        ({"separate": True}, False),
        ({"draft_device": "cuda:1"}, False),
        ({"draft_device": "cpu"}, False),
        ({"targets": 2, "target_device": "cuda:0,cuda:1", "draft_device": "cuda:0"}, False),
        ({"drafts": 2}, False),
        ({"draft_canary": "c"}, False),
        ({"target_device": "cpu"}, False),
        ({"target_device": "cpu", "draft_device": "cpu"}, False),
        ({"target_device": "cpu", "draft_device": "cpu", "separate": False}, True),
        ({"draft": "none"}, False),
    ],
)
def test_targets_carry_a_draft_on_their_own_gpu(settings: dict[str, Any], is_colocated: bool) -> None:
    assert UpSettings(**settings).is_colocated == is_colocated


@pytest.mark.usefixtures("cuda_driver")
def test_every_target_carries_the_draft() -> None:
    own = {"draft_revision": "main", "draft_kv_memory": 2**20, "draft_activations": "float32"}
    pair = {"target": "a", "draft": "b", "target_device": "cuda:0", "metrics_port": 9100, **own}
    for settings, ports in (({"targets": 2}, ["9101", "9104"]), ({"standby": True}, ["9101", "9103"])):
        flags = named_services(**pair, **settings)
        workers, coordinator = list(flags.values())[:-1], flags["coordinator"]
        assert [worker["--metrics-port"] for worker in workers] == ports
        assert "--draft-address" not in coordinator
        for worker in workers:
            assert (worker["--draft"], worker["--draft-revision"]) == ("b", "main")
            assert (worker["--draft-kv-memory"], worker["--draft-activations"]) == (str(2**20), "float32")
    assert "--draft" not in named_services(**pair, separate=True)["target worker"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"separate": False, "drafts": 2}, "separate: a target can carry only one draft"),
        ({"separate": False, "draft_canary": "c"}, "separate: a target can carry only one draft"),
        ({"separate": False, "target_device": "cpu", "draft_device": "cuda:1"}, "only one draft, on its own device"),
        ({"separate": False, "draft_memory_limit": 2**30}, "draft_memory_limit needs --separate"),
    ],
)
def test_drafts_that_targets_cannot_carry_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        UpSettings(**settings)


def test_a_carried_draft_is_checked_before_the_start(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = str(tiny_pair[0]), str(tmp_path)
    settings = UpSettings(target=target, draft=draft, target_device="cpu", separate=False)
    with pytest.raises(ProcessFailedError, match=r"^draft: "):
        check_services(services_of(settings, target, draft))


# --- Several workers


def named_services(**settings: Any) -> dict[str, dict[str, str]]:
    """Flags of all processes by name."""
    services = services_of(UpSettings(**settings), "a", "b")
    return {each.name: dict(zip(each.arguments, each.arguments[1:], strict=False)) for each in services}


def test_the_coordinator_gets_the_addresses_of_all_workers() -> None:
    services = services_of(UpSettings(targets=2, drafts=3, metrics_port=9100), "a", "b")
    *workers, coordinator = services
    addresses = {
        role: ",".join(worker.address for worker in workers if worker.name.startswith(role))
        for role in ("target", "draft")
    }
    assert len({worker.address for worker in workers}) == 5
    flags = dict(zip(coordinator.arguments, coordinator.arguments[1:], strict=False))
    assert (flags["--target-address"], flags["--draft-address"]) == (addresses["target"], addresses["draft"])
    assert {worker.name: worker.starts_last for worker in workers} == {
        "target worker 1": False, "target worker 2": True,
        "draft worker 1": False, "draft worker 2": True, "draft worker 3": True,
    }  # fmt: skip
    ports = {worker.name: worker.settings["metrics_port"] for worker in workers}
    assert ports == {
        "target worker 1": 9101, "draft worker 1": 9102, "target worker 2": 9104, "draft worker 2": 9105,
        "draft worker 3": 9106,
    }  # fmt: skip
    assert [worker.settings["log_name"] for worker in workers] == [worker.name.replace(" ", "-") for worker in workers]


def test_drafts_hold_the_sequences_of_all_targets() -> None:
    flags = named_services(targets=3, drafts=2, max_num_seqs=5)
    assert [flags[name]["--max-sequences"] for name in ("target worker 1", "draft worker 2")] == ["5", "8"]
    assert named_services(drafts=3, max_num_seqs=8)["draft worker 1"]["--max-sequences"] == "8"


@pytest.mark.usefixtures("cuda_driver")
def test_workers_take_devices_in_turns_and_divide_the_cores() -> None:
    gpus = named_services(targets=3, target_device="cuda:0,cuda:1", drafts=2, draft_device="cpu", threads=8)
    assert [gpus[f"target worker {number}"]["--device"] for number in (1, 2, 3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert {gpus[f"target worker {number}"]["--threads"] for number in (1, 2, 3)} == {"8"}
    assert [(gpus[f"draft worker {number}"]["--device"], gpus[f"draft worker {number}"]["--threads"])
            for number in (1, 2)] == [("cpu", "4")] * 2  # fmt: skip
    assert named_services(targets=3, target_device="cpu", threads=2)["target worker 2"]["--threads"] == "1"


@pytest.mark.usefixtures("cuda_driver")
def test_targets_on_one_gpu_need_the_size_of_their_caches(tiny_pair: tuple[Path, Path]) -> None:
    model = str(tiny_pair[0])
    settings = UpSettings(target=model, draft="none", targets=3, target_device="cuda:0,cuda:1")
    with pytest.raises(ProcessFailedError, match=r"^target-kv-memory: must be given, since targets share cuda:0"):
        check_services(services_of(settings, model, None))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_limit_that_is_too_small_names_the_flag(role: str, tiny_pair: tuple[Path, Path]) -> None:
    target, draft = map(str, tiny_pair)
    settings = UpSettings(target=target, draft=draft, separate=True, **{f"{role}_kv_memory": 1})  # type: ignore[arg-type]
    with pytest.raises(ProcessFailedError, match=rf"^{role}-kv-memory: 1B is too small"):
        check_services(services_of(settings, target, draft))


# --- OpenAI's API over HTTP


def http_server(monkeypatch: pytest.MonkeyPatch, *missing: str, **settings: Any) -> list[Service]:
    """The HTTP server of `up` with these settings, on a machine without some packages."""
    for module in missing:
        monkeypatch.setitem(sys.modules, module, None)
    up = SecureUpSettings(**settings)
    return http_services(up, services_of(up, "a", "b")[-1])


@pytest.mark.parametrize(
    ("settings", "port"),
    [
        ({}, 8000),
        ({"host": "::1"}, 8000),
        ({"host": "0.0.0.0"}, None),
        ({"host": "0.0.0.0", "http_port": 9000}, 9000),
        ({"http_port": 0}, None),
    ],
)
def test_the_api_is_served_by_default_only_on_this_machine(settings: dict[str, Any], port: int | None) -> None:
    assert SecureUpSettings(**settings).api_port == port


def test_the_http_server_connects_to_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port(2)
    ports = {"port": first, "http_port": first + 1}
    [server] = http_server(monkeypatch, **ports, host="0.0.0.0", drain_seconds=7, log_format="json")
    assert server.address == f"127.0.0.1:{first + 1}"
    assert dict(zip(server.arguments[::2], server.arguments[1::2], strict=True)) == {
        "--host": "0.0.0.0", "--port": str(first + 1), "--coordinator-address": f"127.0.0.1:{first}",
        "--drain-seconds": "7.0", "--log-level": "info", "--log-format": "json",
    }  # fmt: skip


def test_the_http_server_shows_and_trusts_the_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    server = ca.issue("up", ["DNS:up.example"])
    [service] = http_server(monkeypatch, **server.options, tls_ca=ca.path, http_port=free_port())
    flags = dict(zip(service.arguments[::2], service.arguments[1::2], strict=True))
    cert, key = map(str, (server.cert, server.key))
    assert (flags["--tls-cert"], flags["--tls-key"], flags["--tls-ca"]) == (cert, key, str(ca.path))
    own = [flags[f"--coordinator-tls-{name}"] for name in ("ca", "cert", "key", "name")]
    assert own == [cert, cert, key, "up.example"]


def test_names_are_not_checked_over_http(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    mutual: Any = {**ca.issue("up").options, "tls_ca": ca.path, "allowed_names": "alice"}
    assert SecureUpSettings(**mutual).api_port is None
    with pytest.raises(ValidationError, match="http_port must not be given with allowed_names"):
        SecureUpSettings(**mutual, http_port=9000)


def test_missing_http_packages_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert http_server(monkeypatch, "starlette", "uvicorn") == []
    assert re.search(r"HTTP server disabled: it needs starlette, uvicorn: .*pip install .*\[http\]", caplog.text)
    with pytest.raises(ProcessFailedError, match=r"^http-port: needs starlette, uvicorn: .*pip install .*\[http\]"):
        http_server(monkeypatch, "starlette", http_port=9000)


def test_up_says_why_there_is_no_http_server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert http_server(monkeypatch, http_port=0) == []
    assert not caplog.text
    assert http_server(monkeypatch, host="0.0.0.0") == []
    assert "off, because --host 0.0.0.0 is beyond the loopback interface; --http-port 8000 starts it" in caplog.text


def test_a_port_in_use_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        reason = rf"^http-port: cannot listen on 127.0.0.1:{port}: Address already in use; give another --http-port$"
        with pytest.raises(ProcessFailedError, match=reason):
            http_server(monkeypatch, http_port=port)


def test_callers_are_checked_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"api_tokens: .*: No such file"):
        SecureUpSettings(api_tokens=tmp_path / "tokens")
    with pytest.raises(ValidationError, match="allowed_names: must be given with tls_ca"):
        SecureUpSettings(allowed_names="alice")


def test_only_the_coordinator_gets_the_health_port() -> None:
    *workers, coordinator = services_of(SecureUpSettings(health_port=9000), "a", "b")
    assert "9000" in coordinator.arguments
    assert not any("--health-port" in worker.arguments for worker in workers)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"port": 8000}, "--port 8000, --http-port 8000 must differ"),
        ({"health_port": 50050}, "--port 50050, --health-port 50050, --http-port 8000 must differ"),
        ({"http_port": 9001, "metrics_port": 9000}, "--http-port must not be metrics_port or one of the 2 ports after"),
        ({"metrics_port": 7999}, "--http-port must not be metrics_port or one of the 2 ports after it"),
    ],
)
def test_ports_of_up_must_differ(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        SecureUpSettings(**settings)
