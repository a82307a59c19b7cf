"""The trial on three hosts: its network, load and verdicts; real hosts only as root."""

import os
import shutil
import socket
import time
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
from serving import free_address, serving

from deploy.trial import __main__ as trial
from deploy.trial import images, steps
from deploy.trial.hosts import ADDRESSES, Conditions, Network, TrialError, inside, network
from deploy.trial.load import Load, Tally, random_cases
from deploy.trial.services import Deployment, make_deployment
from deploy.trial.steps import Steps, has_recovered, leftovers, request_faults
from deploy.trial.switch import Wire
from deploy.trial.timeline import Event, Timeline, throughput_figure
from specpool.client import AsyncClient
from specpool.rpc.security.channel import SecurityOptions
from specpool.v1 import generation_pb2 as pb

CAN_MAKE_HOSTS = os.geteuid() == 0 and trial.TUN.exists() and all(map(shutil.which, trial.TOOLS))
SETTINGS = {
    "target": ("target_worker.server", "TargetWorkerSettings"),
    "draft": ("draft_worker.server", "DraftWorkerSettings"),
    "coordinator": ("coordinator.config.settings", "CoordinatorSettings"),
}


def make_wire(**conditions: Any) -> Wire:
    wire = Wire(seed=1)
    wire.conditions = Conditions(**conditions)
    return wire


def test_packets_arrive_late_and_in_order() -> None:
    wire = make_wire(delay=0.002)
    wire.send("client", "draft", b"first", now=1.0)
    wire.send("draft", "client", b"second", now=1.001)
    assert list(wire.arrived(1.0019)) == []
    assert wire.seconds_to_next(1.0) == pytest.approx(0.002)
    assert list(wire.arrived(1.0021)) == [("draft", b"first")]
    assert list(wire.arrived(1.01)) == [("client", b"second")]
    assert wire.seconds_to_next(1.01) is None


def test_seed_decides_which_packets_are_lost() -> None:
    arrived = []
    for _ in range(2):
        wire = make_wire(loss=0.1)
        for number in range(5000):
            wire.send("client", "draft", b"%d" % number, now=0.0)
        arrived.append(list(wire.arrived(0.0)))
        assert wire.counts.forwarded == len(arrived[-1]) == 5000 - wire.counts.lost
    assert arrived[0] == arrived[1]
    assert 400 < wire.counts.lost < 600


def test_disconnected_host_neither_sends_nor_receives() -> None:
    wire = make_wire(cut_off=("draft",))
    for source, destination in (("draft", "client"), ("client", "draft"), ("client", "target")):
        wire.send(source, destination, b"packet", now=0.0)
    assert list(wire.arrived(0.0)) == [("target", b"packet")]
    assert wire.counts.dropped == 2


@pytest.mark.skipif(not CAN_MAKE_HOSTS, reason="needs root, a TUN device, and the commands ip, tc and openssl")
def test_real_packets_are_delayed_and_lost() -> None:
    try:
        with network(seed=1) as hosts:
            with inside("draft"):
                receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                receiver.bind((ADDRESSES["draft"], 7))
            with inside("client"):
                sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            with sender, receiver:
                assert exchange(sender, receiver, 50)[0] == 50
                hosts.impair(delay=0.05, loss=0.2)
                arrived, seconds = exchange(sender, receiver, 50)
                assert 25 < arrived < 50
                assert seconds >= 0.05
                hosts.cut_off(["draft"])
                assert exchange(sender, receiver, 5)[0] == 0
    except TrialError as error:
        pytest.skip(str(error))  # another trial runs, or root may not make namespaces


def exchange(sender: socket.socket, receiver: socket.socket, number: int) -> tuple[int, float]:
    """Number of datagrams that arrive, and seconds until the first one."""
    receiver.settimeout(0.5)
    began, arrived, seconds = time.monotonic(), 0, 0.0
    for _ in range(number):
        sender.sendto(b"datagram", (ADDRESSES["draft"], 7))
    try:
        while arrived < number:
            receiver.recv(64)
            seconds = seconds or time.monotonic() - began
            arrived += 1
    except TimeoutError:
        pass
    return arrived, seconds


def test_rates_and_pauses() -> None:
    timeline = Timeline()
    for at, tokens in ((0.1, 3), (0.4, 1), (0.6, 2), (2.1, 5)):
        timeline.add(at, tokens)
    assert timeline.rates(ended=2.2) == [8.0, 4.0, 0.0, 0.0]
    assert timeline.tokens(0.4, 2.1) == 3
    assert timeline.longest_pause(0.0, 2.2) == pytest.approx(1.5)
    assert timeline.longest_pause(0.7, 2.0) == pytest.approx(1.3)


def test_plot_shows_each_event() -> None:
    events = [Event("draft cut off", 1.0, 2.0), Event("target restarted", 3.0, 4.0)]
    (axes,) = throughput_figure([8.0, 4.0, 0.0, 6.0], events).axes
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["draft cut off", "target restarted"]


def test_verdicts_count_only_their_step() -> None:
    before = Tally(answered=10, wrong=1, failed=1)
    assert request_faults(before, Tally(12, 1, 1)) == []
    assert request_faults(before, Tally(12, 2, 3)) == ["1 answers were wrong", "2 requests failed"]


def state(tokens: int, drafted: int, draft: str = "ready") -> pb.GetServerInfoResponse:
    drafts = {"model": pb.DraftCounters(draft_tokens=drafted)}
    counters = pb.ServerCounters(completion_tokens=tokens, drafts=drafts)
    return pb.GetServerInfoResponse(
        target=pb.WorkerState(state="ready"), draft=pb.WorkerState(state=draft), counters=counters
    )


@pytest.mark.parametrize(
    ("info", "recovered"),
    [
        (state(11, 6), True),
        (state(10, 6), False),
        (state(11, 5), False),
        (state(11, 6, draft="resting"), False),
    ],
)
def test_recovery_needs_both_workers_in_use(info: pb.GetServerInfoResponse, recovered: bool) -> None:
    assert has_recovered(state(10, 5).counters, info) is recovered


class NoNetwork:
    """A network that only records its orders."""

    def __init__(self) -> None:
        self.orders: list[list[str]] = []

    def cut_off(self, hosts: Iterable[str]) -> None:
        self.orders.append(list(hosts))


async def test_load_and_steps_on_a_healthy_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SETTLE_SECONDS", 0.0)
    async with serving() as served, AsyncClient(served.address) as client:
        load, hosts = Load(client, random_cases(4, seed=1)), NoNetwork()
        await load.decode_plainly()
        loading = load.start(2)
        steps_under_load = Steps(cast(Network, hosts), Deployment({}, SecurityOptions()), client, load, cut_seconds=0.4)
        assert await steps_under_load.recover() == []
        assert await steps_under_load.cut_off("draft") == []
        # The fake network cuts nothing off.
        assert await steps_under_load.cut_off("target") == ["tokens came without the target"]
        assert hosts.orders == [["draft"], [], ["target"], []]
        load.finish()
        await loading
        assert await leftovers(client) == []
    assert load.tally.answered > 0
    assert (load.tally.wrong, load.tally.failed, load.faults) == (0, 0, [])
    assert load.timeline.tokens(0, load.now) >= load.tally.answered * 20


async def test_wrong_tokens_and_failures_are_reported() -> None:
    async with serving() as served, AsyncClient(served.address) as client:
        (case,) = cases = random_cases(1, seed=1)
        load = Load(client, cases)
        await load.decode_plainly()
        case.tokens[-1] += 1
        loading = load.start(1)
        load.finish()
        await loading
    assert load.tally == Tally(answered=1, wrong=1, failed=0)
    async with AsyncClient(free_address(), retry_seconds=0) as client:
        load = Load(client, cases)
        loading = load.start(1)
        load.finish()
        await loading
    assert load.tally == Tally(answered=0, wrong=0, failed=1)
    assert "UNAVAILABLE" in load.faults[0]


def test_processes_accept_their_flags(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path, tmp_path, tmp_path, "error")
    assert deployment.address == "10.77.0.2:50050"
    for name, service in deployment.services.items():
        module, settings = SETTINGS[name]
        loaded = getattr(import_module(module), settings).load(name, service.arguments)
        assert f"{loaded.host}:{loaded.port}" == service.address
        assert loaded.tls_ca is not None  # mutual TLS
        assert loaded.allowed_names == (() if name == "coordinator" else ("coordinator",))


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--loss-percent", "21"], "--loss-percent: 21 is not from 0 to 20"),
        (["--delay-ms", "-1"], "--delay-ms: -1 is not from 0 to 1000"),
        (["--cut-seconds", "1"], "--cut-seconds: 1 is not from 4 to 20"),
        (["--concurrency", "0"], "--concurrency: 0 is not from 1 to 32"),
        (["--concurrency", "many"], "invalid int value: 'many'"),
        (["--loss-percent", "nan"], "--loss-percent: nan is not from 0 to 20"),
        (["--hosts", "3"], "unrecognized arguments: --hosts 3"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        trial.parse(flags)
    assert ended.value.code == 2
    assert refusal in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("user", "path", "reason"), [(1000, "/usr/bin", "needs root"), (0, "/nowhere", "needs the command ip")]
)
def test_missing_requirements_are_named(user: int, path: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr(trial.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match=f"^trial: {reason}"):
        trial.main([])


def test_image_storage_must_not_hold_other_files(tmp_path: Path) -> None:
    images.check_storage(tmp_path / "new")
    (tmp_path / "storage").mkdir()
    images.check_storage(tmp_path)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(SystemExit, match=r"^images: --folder: \S+ has thesis.txt, and would be removed"):
        images.check_storage(tmp_path)
    with pytest.raises(SystemExit, match=r"^images: --folder: .* Not a directory"):
        images.check_storage(tmp_path / "thesis.txt")
