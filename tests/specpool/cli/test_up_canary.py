"""The draft canary in `specpool up`: an additional draft worker with another model."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from up_process import Pair, address_of, started, up_command

from specpool.cli.preflight import check_services
from specpool.cli.processes import ProcessFailedError, Service
from specpool.cli.up import services_of
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.v1 import generation_pb2 as pb


def services(**settings: Any) -> dict[str, Service]:
    """Return all services by name."""
    settings = {"target_device": "cpu", "draft_device": "cpu", **settings}
    return {each.name: each for each in services_of(UpSettings(draft_canary="c", **settings), "a", "b")}


def test_the_coordinator_knows_the_drafts_by_name() -> None:
    started = services(drafts=2, lookup_store_tokens=9)
    assert [name for name in started if "target" not in name] == [
        "draft worker 1", "draft worker 2", "canary worker", "coordinator",
    ]  # fmt: skip
    assert started["coordinator"].settings["lookup_store_tokens"] == 9
    assert started["coordinator"].settings["draft_address"] == ",".join([
        f"current={started['draft worker 1'].address}",
        f"current={started['draft worker 2'].address}",
        f"canary={started['canary worker'].address}",
    ])  # fmt: skip


def test_a_canary_is_a_draft_worker_with_another_model() -> None:
    started = services(draft="b", draft_revision="main", draft_kv_memory=2**20, threads=4, targets=2, metrics_port=9100)
    draft, canary = started["draft worker"], started["canary worker"]
    assert (draft.module, canary.module) == ("draft_worker.server", "draft_worker.server")
    assert dict(canary.settings.items() - draft.settings.items()) == {
        "model": "c", "revision": None, "port": int(canary.address.rpartition(":")[2]), "metrics_port": 9105,
        "log_name": "canary-worker",
    }  # fmt: skip
    assert {draft.settings["threads"], canary.settings["threads"]} == {2}  # they draft at the same time
    assert started["target worker 2"].settings["metrics_port"] == 9104
    assert canary.starts_last


@pytest.mark.parametrize("canary", ["mtp", "none"])
def test_a_canary_without_a_model_is_refused(canary: str) -> None:
    with pytest.raises(ValidationError, match="draft_canary must be a model"):
        UpSettings(draft="b", draft_canary=canary)


def test_either_draft_may_serve_all_sequences() -> None:
    started = services(targets=3, drafts=2, max_num_seqs=4)
    names = ("draft worker 1", "canary worker")
    assert [started[name].settings["max_sequences"] for name in names] == [6, 12]


@pytest.mark.usefixtures("cuda_driver")
def test_drafts_are_assigned_devices_round_robin() -> None:
    started = services(draft_device="cuda:1,cuda:0")
    assert [started[f"{name} worker"].settings["device"] for name in ("draft", "canary")] == ["cuda:1", "cuda:0"]


def test_errors_of_a_canary_name_its_flag(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = map(str, tiny_pair)
    settings = UpSettings(target=target, draft=draft, draft_canary=str(tmp_path), target_device="cpu")
    with pytest.raises(ProcessFailedError, match=r"^draft-canary: "):
        check_services(services_of(settings, target, draft))


@pytest.mark.slow
async def test_a_canary_drafts_for_its_share_and_changes_no_token(tiny_pair: Pair) -> None:
    """The canary is the target itself, so all drafts are accepted."""
    flags = ["--draft-canary", str(tiny_pair[0]), "--num-speculative-tokens", "3", "--draft-method", "model"]
    async with (
        started(*up_command(tiny_pair, *flags, "--draft-share", "canary=1")) as process,
        AsyncClient(await address_of(process)) as client,
    ):
        await drafts_of(client)
        plain = await client.generate("abc", max_tokens=30, ignore_eos=True, num_speculative_tokens=0)
        drafted = await client.generate("abc", max_tokens=30, ignore_eos=True)
        current, canary = await drafts_of(client, completion_tokens=60)
    assert drafted.token_ids == plain.token_ids
    assert (current.name, current.share, current.draft_tokens) == ("current", 0, 0)
    assert (canary.name, canary.share) == ("canary", 1)
    assert canary.draft_tokens == canary.accepted_draft_tokens > 0


async def drafts_of(client: AsyncClient, completion_tokens: int = 0) -> Sequence[pb.DraftModelState]:
    """Return the state of both drafts once both are connected and these tokens are counted: the state may be old."""
    while True:
        info = await client.server_info()
        ready = [draft.ready_workers for draft in info.drafts]
        if ready == [1, 1] and info.counters.completion_tokens == completion_tokens:
            return sorted(info.drafts, key=lambda draft: draft.name, reverse=True)
        await asyncio.sleep(0.1)
