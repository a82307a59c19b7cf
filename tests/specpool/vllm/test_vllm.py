"""`RemoteDraft` with a fake draft worker over a real socket, called as vLLM calls it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from serving import RecordingDraft
from vllm_stand_in import MAX_MODEL_LEN, STEP_SECONDS, Row, StandIn, always_draft, save_tokenizer, vllm_config

from coordinator.workers import link
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import FakeTarget, byte_tokenizer
from specpool.vllm import RemoteDraft

FINGERPRINT = TokenizerFiles(byte_tokenizer().to_str().encode(), "", {}, ()).fingerprint
PATIENCE_SECONDS = 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PROBE_SECONDS", 0.05)


@pytest.fixture(autouse=True)
def _drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)


@dataclass
class Served:
    """vLLM with `RemoteDraft`, and the draft worker."""

    vllm: StandIn
    draft: RecordingDraft
    address: str

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await asyncio.to_thread(self.vllm.step)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                await self.steps(1)

    @property
    def first_contacts(self) -> list[Any]:
        """Items that begin or rebuild a sequence in the draft worker."""
        return [item for request in self.draft.requests for item in request.items if item.HasField("sampling")]

    def check(self, *rows: Row) -> None:
        """Assert that every row has the tokens of plain decoding."""
        for row in rows:
            prompt = row.tokens[: row.prompt_length]
            assert row.output == self.vllm.target.continuation(prompt, len(row.output))


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Start vLLM's stand-in with `RemoteDraft` and a fake draft worker."""

    @asynccontextmanager
    async def serving(acceptance: float = 1.0, draft_timeout: str = "5", **knobs: Any) -> AsyncIterator[Served]:
        target = FakeTarget()
        draft = RecordingDraft(target, acceptance=acceptance, **{"fingerprint": FINGERPRINT, **knobs})
        address = await draft.start()
        monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", address)
        monkeypatch.setenv("SPECPOOL_DRAFT_TIMEOUT_SECONDS", draft_timeout)
        remote = await asyncio.to_thread(RemoteDraft, vllm_config(tokenizer))
        remote.load_model(object())
        try:
            yield Served(StandIn(remote, target), draft, address)
        finally:
            await asyncio.to_thread(remote.close)
            await draft.stop()

    return serving


async def test_drafts_are_accepted_and_caches_are_never_rebuilt(serve: Serve) -> None:
    async with serve(acceptance=0.8) as served:
        rows = [served.vllm.add([9, 8, 7 + i]) for i in range(3)]
        await served.until(lambda: sum(row.accepted for row in rows) > 40)
        served.check(*rows)
        assert len(served.first_contacts) == 3
        items = [item for request in served.draft.requests for item in request.items]
        assert all(item.base_length > 0 for item in items if not item.HasField("sampling"))


async def test_rows_arrive_leave_move_and_swap(serve: Serve) -> None:
    async with serve() as served:
        vllm = served.vllm
        rows = [vllm.add([1, 2, 3, i]) for i in range(4)]
        await served.steps(10)
        vllm.remove(rows[1])  # the last row takes its place
        await served.steps(5)
        vllm.swap(0, 2)
        rows.append(vllm.add([50, 51]))
        await served.steps(10)
        served.check(*rows)
        assert len(served.first_contacts) == 5
        for row in list(vllm.rows):
            vllm.remove(row)
        rows.append(vllm.add([60]))
        await served.until(lambda: len(served.draft.caches) <= 1)


async def test_equal_rows_both_get_drafts(serve: Serve) -> None:
    async with serve() as served:
        twins = [served.vllm.add([5, 5, 5]), served.vllm.add([5, 5, 5])]
        await served.steps(6)
        served.vllm.swap(0, 1)
        await served.steps(10)
        served.check(*twins)
        assert all(twin.accepted for twin in twins)
        assert len(served.first_contacts) == 2


async def test_a_resumed_row_uses_the_prefix_cache(serve: Serve) -> None:
    async with serve() as served:
        other, row = served.vllm.add([1]), served.vllm.add([*range(100, 164)])
        await served.until(lambda: row.accepted > 20)
        served.vllm.preempt(row)
        await served.steps(3)
        row.chunks = 3
        served.vllm.insert(row)
        before = row.accepted
        await served.until(lambda: row.accepted > before + 5)
        served.check(row, other)
        assert served.first_contacts[-1].cache_namespace == b""
        assert served.draft.hits >= 64


async def test_chunked_prefill(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_PREFILL_TOKENS", "32")
    async with serve() as served:
        first, late = served.vllm.add([1, 2]), served.vllm.add([i % 250 for i in range(200)], chunks=4)
        await served.until(lambda: late.accepted > 3)
        served.check(first, late)
        assert all(len(item.token_ids) <= 32 for request in served.draft.requests for item in request.items)


@pytest.mark.parametrize("by_setting", [True, False])
async def test_drafts_end_at_the_limit(by_setting: bool, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_setting:
        monkeypatch.setenv("SPECPOOL_DRAFT_MAX_LENGTH", "48")
    async with serve(max_model_len=4096 if by_setting else 48) as served:
        row = served.vllm.add([4, 5, 6])
        await served.until(lambda: len(row.tokens) > 80)
        served.check(row)
        items = [item for request in served.draft.requests for item in request.items]
        assert row.accepted
        assert max(item.base_length + len(item.token_ids) + item.num_draft_tokens for item in items) <= 48


async def test_a_row_reaches_max_model_len(serve: Serve) -> None:
    async with serve() as served:
        row = served.vllm.add([i % 250 for i in range(MAX_MODEL_LEN - 12)])
        await served.until(lambda: len(row.tokens) == MAX_MODEL_LEN)
        served.check(row)


async def test_more_rows_than_draft_slots(serve: Serve) -> None:
    async with serve(slots=2) as served:
        rows = [served.vllm.add([i, i + 1]) for i in range(5)]
        await served.steps(30)
        served.check(*rows)
        assert sum(row.accepted > 0 for row in rows) >= 2


async def test_drafts_resume_after_a_draft_worker_restart(serve: Serve) -> None:
    async with serve() as served:
        row = served.vllm.add([7, 7, 8])
        await served.until(lambda: row.accepted > 3)
        await served.draft.stop()
        await served.steps(5)
        accepted = row.accepted
        await served.draft.start(served.address)
        await served.until(lambda: row.accepted > accepted + 5)
        served.check(row)


async def test_a_draft_worker_with_another_tokenizer_gets_vllms_at_each_start(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.specpool")
    async with serve(fingerprint="another", translation="shared") as served:
        assert "the draft worker translates tokens (shared): fake has 50% of vLLM's vocabulary" in caplog.messages
        row = served.vllm.add([7, 7, 8])
        await served.until(lambda: row.accepted > 3)
        await served.draft.stop()
        await served.draft.start(served.address)
        accepted = row.accepted
        await served.until(lambda: row.accepted > accepted + 5)
        served.check(row)
        assert len(served.draft.tokenizers) == 2
        assert all(request.translation_id for request in served.draft.requests)


async def test_lost_draft_caches_are_rebuilt(serve: Serve) -> None:
    async with serve() as served:
        row = served.vllm.add([7, 7, 9])
        await served.until(lambda: row.accepted > 3)
        served.draft.forget()
        accepted = row.accepted
        await served.until(lambda: row.accepted > accepted + 5)
        served.check(row)


async def test_a_slow_draft_worker_causes_backoff(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PROBE_SECONDS", 30)
    async with serve(draft_timeout="0.2") as served:
        row = served.vllm.add([7, 1])
        await served.until(lambda: row.accepted > 3)
        served.draft.delay = PATIENCE_SECONDS
        asked = len(served.draft.requests)
        await served.until(lambda: len(served.draft.requests) > asked)
        await served.steps(10)
        served.check(row)
        assert len(served.draft.requests) == asked + 1


@pytest.mark.parametrize(
    "arguments", [(), (None, None, None), ([[1]], None, None), ([[1], [2]], [3, 4], [[1], [2]]), ([[1]], {}, {})]
)
async def test_invalid_arguments_only_cost_drafts(
    arguments: Any, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:
        row = served.vllm.add([7, 1, 4])
        await served.steps(2)
        with caplog.at_level(logging.ERROR, "vllm.specpool"):
            for _ in range(2):
                drafts = served.vllm.remote.propose(*arguments)
        assert not any(drafts)
        errors = [record.name for record in caplog.records if record.levelno == logging.ERROR]
        assert errors == ["vllm.specpool"]
        accepted = row.accepted
        await served.until(lambda: row.accepted > accepted + 3)
        served.check(row)


async def test_two_servers_share_a_draft_worker(serve: Serve, tokenizer: str) -> None:
    async with serve() as served:
        remote = await asyncio.to_thread(RemoteDraft, vllm_config(tokenizer))
        other = StandIn(remote, served.vllm.target)
        rows = [served.vllm.add([1, 2]), other.add([3, 4])]
        for _ in range(15):
            await asyncio.gather(served.steps(1), asyncio.to_thread(other.step))
        await asyncio.to_thread(remote.close)
        served.check(*rows)
        assert all(row.accepted for row in rows)
        assert len({request.coordinator_id for request in served.draft.requests}) == 2


async def test_sequences_are_released_when_vllm_idles_or_exits(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.vllm.link.IDLE_SECONDS", 20 * STEP_SECONDS)
    async with serve() as served:
        row = served.vllm.add([7, 1, 4])
        await served.until(lambda: row.accepted > 3)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while served.draft.caches:  # noqa: ASYNC110 - the worker sends no notice
                await asyncio.sleep(0.01)
        accepted = row.accepted
        await served.until(lambda: row.accepted > accepted + 3)
        served.check(row)
        await asyncio.to_thread(served.vllm.remote.close)
        assert served.draft.caches == {}


async def test_sequences_are_released_when_vllm_exits_while_the_link_backs_off(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specpool.vllm.link.IDLE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(link, "PROBE_SECONDS", PATIENCE_SECONDS)
    async with serve(draft_timeout="0.5") as served:
        row = served.vllm.add([7, 1, 4])
        await served.until(lambda: row.accepted > 3)
        served.draft.delay = PATIENCE_SECONDS
        requests = len(served.draft.requests)
        await served.until(lambda: len(served.draft.requests) > requests)
        served.draft.delay = 0
        assert served.draft.caches
        await asyncio.to_thread(served.vllm.remote.close)
        assert served.draft.caches == {}


async def test_only_one_rank_asks_for_drafts(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    ranks = {"world_size": 4, "tensor_parallel_size": 2}
    other = RemoteDraft(vllm_config(tokenizer, rank=3, **ranks))  # does not connect
    assert other.propose([[1], []], None, None) == [[], []]
    monkeypatch.setenv("SPECPOOL_DRAFT_START_SECONDS", "0")
    with pytest.raises(ValueError, match="cannot use the draft worker"):
        RemoteDraft(vllm_config(tokenizer, rank=2, **ranks))
