"""Losing target worker processes while clients stream: the standby takes over, and no token changes."""

import signal
from itertools import pairwise
from pathlib import Path

import pytest
from delta_nets import save_delta_net
from failover import lose_target, until_ready, worker_at

from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient

PROMPTS = ["one", "two", "three", "four"]
MAX_TOKENS = 400


@pytest.mark.slow
@pytest.mark.parametrize("is_recurrent", [False, True])
async def test_standby_takes_over_from_lost_processes(
    tiny_pair: tuple[Path, Path], tmp_path: Path, is_recurrent: bool
) -> None:
    target, draft = map(str, tiny_pair)
    if is_recurrent:
        target = draft = str(save_delta_net(tmp_path))
    settings = UpSettings(
        port=0, target=target, draft=draft, standby=True, max_model_len=512, threads=1, drain_seconds=1,
        log_level="error",
    )  # fmt: skip
    async with running(settings) as address, AsyncClient(address) as client:
        served_by = [(await until_ready(client, standby=True)).target.address]
        for fault in (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP):
            row = await lose_target(client, PROMPTS, MAX_TOKENS, fault, standby=True)
            assert row["took_over"]
            assert row["equal"]
            served_by.append((await until_ready(client, standby=True)).target.address)
        assert all(earlier != later for earlier, later in pairwise(served_by))
        assert len(set(served_by)) == 2


@pytest.mark.slow
async def test_stopped_target_without_a_standby_is_restarted(tiny_pair: tuple[Path, Path]) -> None:
    settings = UpSettings(
        port=0, target=str(tiny_pair[0]), draft="none", max_model_len=512, threads=1, drain_seconds=1, log_level="error"
    )
    async with running(settings) as address, AsyncClient(address) as client:
        row = await lose_target(client, PROMPTS, MAX_TOKENS, signal.SIGSTOP, standby=False)
        assert row["equal"]


@pytest.mark.slow
async def test_idle_standby_uses_no_processor(tiny_pair: tuple[Path, Path]) -> None:
    settings = UpSettings(
        port=0, target=str(tiny_pair[0]), draft="none", standby=True, max_model_len=512, threads=2, drain_seconds=1,
        log_level="error",
    )  # fmt: skip
    async with running(settings) as address, AsyncClient(address) as client:
        info = await until_ready(client, standby=True)
        workers = [worker_at(state.address) for state in (info.target, info.standby)]
        before = [sum(worker.cpu_times()[:2]) for worker in workers]
        for _ in range(5):
            await client.generate("abc", max_tokens=MAX_TOKENS, ignore_eos=True)
        active, idle = (sum(worker.cpu_times()[:2]) - start for worker, start in zip(workers, before, strict=True))
        assert idle < 0.1 * active
