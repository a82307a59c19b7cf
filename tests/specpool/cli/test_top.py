"""`specpool top`: numbers, layout, and the command against a coordinator with fake workers."""

import asyncio
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from rich.console import Console
from rich.live import Live
from serving import PATIENCE_SECONDS, Serving, free_address, make_request, serving

from coordinator.server import CoordinatorServer
from specpool.cli.generate import generate
from specpool.cli.generate_settings import GenerateSettings
from specpool.cli.top import TopSettings, top
from specpool.cli.top_panels import Panels, failure_panel
from specpool.cli.top_view import activity, view_of
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb


def state(uptime_s: float, **counters: Any) -> pb.GetServerInfoResponse:
    return pb.GetServerInfoResponse(uptime_s=uptime_s, counters=pb.ServerCounters(**counters))


EARLIER = state(
    100.0, requests=10, rounds=50, completion_tokens=400, prompt_tokens=1000, cached_tokens=500, cache_misses=1,
    finished={"stop": 7}, refused={"RESOURCE_EXHAUSTED": 2}, stage_seconds={"draft": 1.0, "verify": 3.0},
    draft_lengths=[20, 0, 10], drafts={"model": pb.DraftCounters(draft_tokens=20, accepted_draft_tokens=15)},
    grouping=pb.GroupingCounters(same_length_rounds=5, mixed_rounds=5, group_sizes=[40, 10]),
)  # fmt: skip
LATER = state(
    104.0, requests=14, rounds=58, completion_tokens=448, prompt_tokens=1200, cached_tokens=550, cache_misses=1,
    finished={"stop": 8, "length": 2}, refused={"RESOURCE_EXHAUSTED": 4}, stage_seconds={"draft": 2.0, "verify": 6.0},
    draft_lengths=[24, 0, 18, 4],
    drafts={
        "model": pb.DraftCounters(draft_tokens=40, accepted_draft_tokens=25),
        "ngram": pb.DraftCounters(draft_tokens=8, accepted_draft_tokens=8),
    },
    grouping=pb.GroupingCounters(same_length_rounds=8, mixed_rounds=6, group_sizes=[44, 12, 2]),
)  # fmt: skip


def test_rates_and_shares_cover_the_time_between_two_states() -> None:
    result = activity(LATER, EARLIER)
    assert (result.seconds, result.tokens_per_s, result.prompt_tokens_per_s) == (4.0, 12.0, 50.0)
    assert (result.requests_per_s, result.rounds_per_s, result.cache_misses_per_s) == (1.0, 2.0, 0.0)
    assert result.cached_share == 0.25
    assert result.finished_per_s == {"stop": 0.25, "length": 0.5}
    assert result.refused_per_s == {"RESOURCE_EXHAUSTED": 0.5}
    assert result.stage_shares == {"draft": 0.25, "verify": 0.75}
    assert result.methods["model"].tokens_per_s == 5.0
    assert {method: drafts.acceptance_rate for method, drafts in result.methods.items()} == {"model": 0.5, "ngram": 1.0}
    assert result.drafts.acceptance_rate == pytest.approx(18 / 28)
    assert result.tokens_per_round == 48 / 16
    assert result.drafted_share == 0.75
    assert result.mean_acceptance_length == 1 + 18 / 12
    assert result.draft_lengths == {0: 0.25, 2: 0.5, 3: 0.25}
    assert result.group_sizes == {1: 0.5, 2: 0.25, 3: 0.25}
    assert result.mean_group_size == 1.75
    assert result.same_length_share == 0.75


@pytest.mark.parametrize(
    "restarted",
    [
        pytest.param(state(3.0, requests=20, rounds=60), id="shorter uptime"),
        pytest.param(state(120.0, requests=20, rounds=49), id="longer uptime"),
    ],
)
def test_a_server_restart_resets_the_rates(restarted: pb.GetServerInfoResponse) -> None:
    result = activity(restarted, EARLIER)
    assert result == activity(restarted)
    assert (result.seconds, result.requests_per_s) == (restarted.uptime_s, 20 / restarted.uptime_s)


def test_an_idle_server_has_no_shares() -> None:
    result = activity(EARLIER, EARLIER)
    assert (result.seconds, result.tokens_per_s) == (0.0, 0.0)
    assert result.drafts.acceptance_rate is result.mean_acceptance_length is result.cached_share is None
    assert result.tokens_per_round is result.drafted_share is None
    assert result.same_length_share is result.mean_group_size is None
    assert [result.stage_shares, result.draft_lengths, result.methods, result.finished_per_s] == [{}, {}, {}, {}]


def server(*targets: pb.WorkerState, drafts: Sequence[pb.WorkerState] = ()) -> pb.GetServerInfoResponse:
    """State of a server with a sharded target, a draft worker in backoff, and more workers."""
    model = common_pb2.ModelInfo(
        model="a/model", device="cpu", dtype="float32", equivalence=common_pb2.EQUIVALENCE_BITWISE
    )
    load = common_pb2.WorkerLoad(
        slots_total=8, slots_in_use=2, kv_bytes_total=2**30, kv_positions_total=4096, kv_positions_free=1024
    )
    info = pb.GetServerInfoResponse(
        version="1.2", policy="ragged", running=3, max_num_seqs=16, queued=40, queue_size=256,
        targets=[pb.WorkerState(address="t:1", state="ready", model=model, load=load)],
        draft_workers=[pb.WorkerState(address="d:1", state="resting", reason="slow", model=model)],
    )  # fmt: skip
    info.targets[0].model.tensor_parallel, info.targets[0].model.activations = 2, "int8"
    info.targets.extend(targets)
    info.draft_workers.extend(drafts)
    info.MergeFrom(LATER)
    return info


def test_unknown_values_of_a_worker_are_none() -> None:
    target, draft = view_of("a:1", server(), None, None).workers
    assert (target.slots_in_use, target.kv_usage, target.equivalence) == (2, 0.75, "bitwise")
    assert (draft.slots_in_use, draft.kv_usage, draft.reason) == (None, None, "slow")
    assert (target.ranks, draft.ranks) == (2, 1)
    assert (target.activations, draft.activations) == ("int8", "")
    (unknown,) = view_of("a:1", pb.GetServerInfoResponse(targets=[pb.WorkerState()]), None, None).workers
    assert (unknown.role, unknown.model, unknown.equivalence, unknown.ranks) == ("target", "", "", None)


def test_every_worker_is_shown() -> None:
    refused = pb.WorkerState(address="t:2", state="refused", reason="another model")
    info = server(refused, drafts=[pb.WorkerState(address="d:2", state="ready")])
    workers = view_of("a:1", info, None, None).workers
    assert [(worker.role, worker.address) for worker in workers] == [
        ("target", "t:1"), ("target", "t:2"), ("draft", "d:1"), ("draft", "d:2"),
    ]  # fmt: skip
    assert "another model" in rendered(Panels(view_of("a:1", info, None, None)), 80)


def test_recurrent_states_are_shown() -> None:
    info = server()
    assert "states" not in rendered(Panels(view_of("a:1", info, None, None)), 80)
    info.targets[0].load.state_bytes_total = 3 * 2**20
    assert re.search(r"  states +3 MiB", rendered(Panels(view_of("a:1", info, None, None)), 80))


def test_a_carried_draft_is_shown_with_its_target() -> None:
    info = server(drafts=[pb.WorkerState(address="t:1", state="ready")])
    view = view_of("a:1", info, None, None)
    assert [worker.is_carried for worker in view.workers] == [False, False, True]
    assert "draft with the target at t:1: ready" in rendered(Panels(view), 80)


def rendered(view: Any, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(view)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
def test_a_view_fits_any_terminal(width: int) -> None:
    models = pb.GetModelInfoResponse(max_model_len=2048, num_speculative_tokens=5)
    lines = rendered(Panels(view_of("a:1", server(), models, EARLIER)), width).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    assert "Window" in text
    if width >= 80:
        shown = ["40 of 256", "3 of 16", "draft tokens: 5", "resting", "slow", "75% of 1,024 MiB", "2.50", "ngram"]
        for part in [*shown, "2 ranks"]:
            assert part in text, part
        assert width < 200 or "float32, int8 activations, bitwise" in text
        assert "1 ranks" not in text


def screen(info: pb.GetServerInfoResponse, width: int, height: int) -> list[str]:
    """Return the lines that a terminal of this size shows."""
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, color_system=None, force_terminal=True)
    with Live(console=console, screen=True) as live:
        file.seek(0)
        file.truncate()
        live.update(Panels(view_of("127.0.0.1:50050", info, None, EARLIER), height), refresh=True)
        return re.sub(r"\x1b\[\S*?[A-Za-z]", "", file.getvalue()).splitlines()


def test_a_terminal_of_80_by_24_shows_all_panels_with_the_workers_first() -> None:
    resting = pb.WorkerState(address=f"{'d' * 70}:2", state="resting", reason="timeout")
    info = server(drafts=[resting])
    lines = screen(info, 80, 24)
    text = "\n".join(lines)
    panels = [text.index(name) for name in ("Workers", "Window", "Speculation", "Rounds")]
    assert panels == sorted(panels)
    workers = ["target ready, 2 of 8 slots, KV cache 75%, at t:1", "draft resting, at d:1", "slow", "resting, at dddd"]
    shown = ["3 of 16", "40 of 256", "tokens/s", "RESOURCE_EXHAUSTED", "3.00 all rounds", "2.50 75% of rounds"]
    for part in [*workers, *shown, "ngram", "mean 1.8", "time  verify: 75%"]:
        assert part in text, part
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80


def test_several_drafts_are_compared() -> None:
    def state(rounds: int) -> list[pb.DraftModelState]:
        counts = {"rounds": rounds, "completion_tokens": 3 * rounds, "draft_tokens": 4 * rounds}
        counts |= {"accepted_draft_tokens": 2 * rounds, "expected_tokens_per_s": 200}
        current = pb.DraftModelState(name="current", share=0.9, **counts)
        new = pb.DraftModelState(name="new", weights_fingerprint="0123456789", share=0.1, expected_tokens_per_s=150)
        return [current, new]

    before, info = pb.GetServerInfoResponse(drafts=state(10)), server()
    assert not view_of("a:1", info, None, None).drafts
    info.drafts.extend(state(30))
    info.speculation.plain_tokens_per_s = 100
    current, new = view_of("a:1", info, None, before).drafts
    assert (current.acceptance_rate, current.tokens_per_round) == (0.5, 3)
    assert (new.acceptance_rate, new.tokens_per_round, new.gain) == (None, None, 1.5)
    assert view_of("a:1", info, None, info).drafts[0] == current  # an idle draft shows its rates since the start
    del info.draft_workers[:]
    workers = [pb.WorkerState(address="d:1", state="ready"), pb.WorkerState(address="d:2", state="ready")]
    info.draft_workers.extend(workers)
    lines = screen(info, 80, 24)
    text = "\n".join(lines)
    assert "draft current: gain 2.00x, 50% accepted, share 90%" in text
    assert "draft new (01234567): gain 1.50x, - accepted, share 10%" in text
    assert "time  verify: 75%" in text
    assert len(lines) == 24


def test_a_large_terminal_shows_the_details_of_workers() -> None:
    assert "a/model" in "\n".join(screen(server(), 80, 50))
    assert "a/model" not in "\n".join(screen(server(), 80, 24))


def test_tiny_shares_are_not_listed() -> None:
    info = server()
    info.counters.draft_lengths[:] = [997, 2, 50]
    assert "draft tokens  0: 95%  2: 5% " in rendered(Panels(view_of("a:1", info, None, None)), 80)


def test_control_characters_of_a_server_never_reach_the_terminal() -> None:
    info = server()
    info.draft_workers[0].reason = "\x1b[2J[red]gone"
    assert "  [2J[red]gone" in rendered(Panels(view_of("a:1", info, None, None)), 100)
    assert "\x1b" not in rendered(failure_panel("a:1", "\x1b]0;title\x07"), 100)


async def once(address: str, capsys: pytest.CaptureFixture[str], **settings: Any) -> tuple[int, str, str]:
    status = await asyncio.to_thread(top, TopSettings(address=address, interval=0.1, **settings))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


async def test_prints_one_view_if_the_output_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as served:
        await served.expect(make_request())
        status, out, err = await once(served.address, capsys)
        assert (status, err) == (0, "")
        assert f"at {served.address}" in out
        status, out, _ = await once(served.address, capsys, json=True)
        view, info = json.loads(out), await served.info()
    since_start = view["since_start"]
    assert since_start["requests_per_s"] * since_start["seconds"] == pytest.approx(1)
    assert since_start["tokens_per_s"] * since_start["seconds"] == pytest.approx(info.counters.completion_tokens)
    assert view["now"]["requests_per_s"] == 0.0
    assert view["window"]["draft_length"] == 4
    assert [worker["state"] for worker in view["workers"]] == ["ready", "ready"]


async def test_reports_an_unreachable_server(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = await once(free_address(), capsys, wait_seconds=0)
    assert (status, out) == (1, "")
    assert re.fullmatch(r"specpool top: 127\.0\.0\.1:\d+: UNAVAILABLE: [^\n]*\n", err)


async def test_errors_name_the_flag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    async with serving() as served:
        status, _, err = await once(served.address, capsys, tls_ca=ca.path)
        assert (status, "does not use TLS: connect without --tls-ca" in err) == (1, True)
        settings = GenerateSettings(address=served.address, prompt="Once", tls_ca=ca.path)
        assert await asyncio.to_thread(generate, settings) == 1
    assert capsys.readouterr().err.endswith(" does not use TLS: connect without --tls-ca\n")


class Terminal:
    """`specpool top` on a terminal."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> None:
        self.process, self._reader, self.text = process, reader, ""

    async def until(self, text: str) -> None:
        """Wait for this text, after the text matched by the previous call."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while text not in self.text:
                self.text += (await self._reader.read(65536)).decode(errors="replace")
        self.text = self.text.partition(text)[2]


@asynccontextmanager
async def terminal_of(address: str) -> AsyncIterator[Terminal]:
    controller, terminal = os.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specpool.cli.main", "top", "--address", address, "--interval", "0.1",
        stdin=terminal, stdout=terminal, stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"},
    )  # fmt: skip
    os.close(terminal)
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(controller, "rb", 0)
    )
    try:
        yield Terminal(process, reader)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        transport.close()


async def restart(served: Serving) -> None:
    """Start another coordinator at the same address."""
    settings = served.process.coordinator.settings.model_copy(update={"port": int(served.address.rpartition(":")[2])})
    served.process = CoordinatorServer(settings)
    await served.process.start()


@pytest.mark.parametrize("end", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_survives_a_server_restart_and_restores_the_terminal(end: signal.Signals) -> None:
    async with serving(with_draft=False) as served, terminal_of(served.address) as terminal:
        await terminal.until("Workers")
        if end is signal.SIGINT:
            served.process.server.stop()
            await served.process.wait_stopped()
            await terminal.until("No answer")
            await restart(served)
            await terminal.until("Workers")
        terminal.process.send_signal(end)
        await terminal.until("\x1b[?1049l")  # out of the alternate screen
        assert await terminal.process.wait() == 0
        assert "Traceback" not in terminal.text
