"""A coordinator with several draft workers: they share the sequences, and fail one by one."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest
from serving import RecordingDraft, RecordingTarget, Serving, make_request, serving

from specpool.rpc.ports import free_port
from specpool.v1 import draft_worker_pb2
from specpool.v1 import generation_pb2 as pb

PASS_SECONDS = 0.002


class FaultyDraft(RecordingDraft):
    """Hangs, or answers for another round."""

    hangs = garbles = False

    async def Propose(self, request: draft_worker_pb2.ProposeRequest, context: Any) -> draft_worker_pb2.ProposeResponse:
        if self.hangs:
            self.requests.append(request)
            await asyncio.Event().wait()
        response = await super().Propose(request, context)
        if self.garbles:
            response.round_id += 1
        return response


@asynccontextmanager
async def serving_two(
    target: RecordingTarget | None = None,
    make: Callable[..., RecordingDraft] = FaultyDraft,
    slots: tuple[int, int] = (16, 16),
    **settings: Any,
) -> AsyncIterator[tuple[Serving, list[Any]]]:
    """Run a coordinator with two draft workers; yield them too."""
    target = target or RecordingTarget(pass_seconds=lambda _: PASS_SECONDS)
    drafts = [make(target, acceptance=0.9, slots=each) for each in slots]
    async with serving(target, drafts[0], others=drafts[1:], **settings) as served:
        yield served, drafts


def requests(count: int, max_tokens: int = 64) -> list[pb.GenerateRequest]:
    return [make_request([i, 2, 3], max_tokens, ignore_eos=True) for i in range(count)]


async def generate(served: Serving, asked: list[pb.GenerateRequest]) -> list[pb.GenerateResponse]:
    """Generate and compare all tokens with plain decoding."""
    return await asyncio.gather(*map(served.expect, asked))


def seen(draft: RecordingDraft) -> set[int]:
    """The sequences that a draft worker was asked for."""
    return {item.sequence_id for request in draft.requests for item in request.items}


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - polls a fake worker
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("policy", "overlap"), [("ragged", "off"), ("exspec", "on"), ("eqspec", "on")])
async def test_two_draft_workers_share_the_sequences(policy: str, overlap: str) -> None:
    """With overlap, they draft branches."""
    async with serving_two(policy=policy, overlap=overlap) as (served, (one, other)):
        responses = await generate(served, requests(8))
        assert all(response.speculative_decoding.num_draft_tokens for response in responses)
        assert min(len(seen(one)), len(seen(other))) >= 3
        assert not seen(one) & seen(other)
        has_branches = any(item.num_branches for request in one.requests for item in request.items)
        assert has_branches == (overlap == "on" and policy != "eqspec")
        info = await served.until_idle()
        assert info.counters.cache_misses == 0
        assert {worker.address for worker in info.draft_workers} == {*served.draft_address.split(",")}
        assert info.draft == info.draft_workers[0]


@pytest.mark.parametrize(("fault", "overlap"), [("dies", "on"), ("hangs", "off"), ("garbles", "on")])
async def test_a_failing_draft_worker_costs_only_its_own_drafts(
    fault: str, overlap: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"draft_timeout_seconds": 0.2, "overlap": overlap}
    async with serving_two(**settings) as (served, (one, other)):
        running = asyncio.create_task(generate(served, requests(8, 400)))
        await until(lambda: len(other.requests) > 20)
        address = served.draft_address.split(",")[1]
        if fault == "dies":
            await other.stop()
        else:
            setattr(other, fault, True)
        first = seen(one)
        await until(lambda: address in caplog.text)  # it may rest for a second only
        before = len(one.requests)
        await until(lambda: len(one.requests) > before + 5)
        await until(lambda: seen(one) > first), "the others' sequences have moved"
        assert (await served.info()).draft_workers[0].state == "ready"
        other.hangs = other.garbles = False
        if fault == "dies":
            await other.start(address)
        await running
        await served.until(lambda info: info.draft_workers[1].state == "ready")
        before = len(other.requests)
        await generate(served, requests(4))
        assert len(other.requests) > before, "it has rejoined"
        await served.until_idle()


async def test_slots_taken_by_others_move_sequences() -> None:
    async with serving_two(slots=(4, 16)) as (served, (one, other)):
        one.caches |= {("another coordinator", i): [1] for i in range(4)}
        responses = await generate(served, requests(4))
        assert all(response.speculative_decoding.num_draft_tokens for response in responses)
        assert len(seen(other)) == 4
        one.forget()
        await served.until_idle()


async def test_two_coordinators_share_a_draft_worker() -> None:
    target, shared = RecordingTarget(), RecordingDraft(RecordingTarget())
    async with serving(target, shared) as served:
        addresses = [served.draft_address]
        async with serving(further_draft_addresses=addresses) as other:
            both = [generate(served, requests(4)), generate(other, requests(8))]
            responses = await asyncio.gather(*both)
            assert all(each.speculative_decoding.num_draft_tokens for own in responses for each in own)
            assert len({request.coordinator_id for request in shared.requests}) == 2
            assert len(seen(other.draft)) == 4


async def test_other_tokenizers_are_refused_by_name() -> None:
    target = RecordingTarget()
    drafts = [RecordingDraft(target, fingerprint="other"), RecordingDraft(target)]
    async with serving(target, drafts[0], others=drafts[1:], wait_for_draft=False) as served:
        info = await served.until(lambda info: {each.state for each in info.draft_workers} == {"refused", "ready"})
        assert "uses a different tokenizer" in info.draft_workers[0].reason
        assert info.draft == info.draft_workers[1], "the first that is ready"
        await generate(served, requests(4))
        assert (len(seen(drafts[0])), len(seen(drafts[1]))) == (0, 4)


async def test_answers_of_an_earlier_process_are_refused() -> None:
    """The worker at an address changes without a broken connection."""
    async with serving_two() as (served, (_, other)):
        running = asyncio.create_task(generate(served, requests(8, 200)))
        await until(lambda: len(other.requests) > 20)
        earlier, other.instance_id = other.instance_id, "another process"
        other.forget()
        reasons = []
        await served.until(lambda info: reasons.append(info.draft_workers[1].reason) or reasons[-1])
        assert "instance another process responded instead of" in reasons[-1]
        assert earlier in reasons[-1]
        await running
        await served.until(lambda info: info.draft_workers[1].state == "ready")
        await served.until_idle()


async def test_records_of_a_name_are_followed() -> None:
    """Two workers at the same port of two addresses, one after the other."""
    target, port = RecordingTarget(pass_seconds=lambda _: PASS_SECONDS), free_port()
    drafts = {host: RecordingDraft(target, acceptance=0.9) for host in ("127.0.0.1", "127.0.0.2")}
    one, other = drafts.values()
    records = ["127.0.0.1"]

    async def resolve(host: str, port: int) -> list[str]:
        assert host == "drafts.svc"
        if not records:
            raise socket.gaierror(socket.EAI_NONAME, "no records")
        return records

    names = [f"dns:///drafts.svc:{port}"]
    module = "specpool.rpc.discovery"
    with mock.patch(f"{module}._resolve", resolve), mock.patch(f"{module}.RESOLVE_SECONDS", 0.05):
        for host, draft in drafts.items():
            await draft.start(f"{host}:{port}")
        async with serving(target, with_draft=False, further_draft_addresses=names) as served:
            await served.until(lambda info: info.draft.state == "ready")
            running = asyncio.create_task(generate(served, requests(4, 1000)))
            await until(lambda: len(seen(one)) == 4)
            records.append("127.0.0.2")
            await served.until(lambda info: [each.state for each in info.draft_workers] == ["ready", "ready"])
            await generate(served, requests(4))
            assert (len(seen(one)), len(seen(other))) == (4, 4)
            records.remove("127.0.0.1")
            await generate(served, requests(2))
            assert not running.done()
            await running
            await served.until(lambda info: [each.address for each in info.draft_workers] == [f"127.0.0.2:{port}"])
            assert len(seen(one)) == 4
            await generate(served, requests(4))
            records.clear()  # the draft is withdrawn
            await served.until(lambda info: not info.draft_workers)
            await generate(served, requests(2))
        for draft in drafts.values():
            await draft.stop()
