"""Workers that give wrong answers: clients never get a wrong token, no call hangs, and the service recovers."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from lab.faults import OWN_DRAFTS
from lab.garbage import DRAFT_FAULTS, TARGET_FAULTS, GarbageDraft, GarbageTarget
from serving import Serving, check_tokens, make_request, serving, stream

from coordinator.workers.interface import UnusableModelError
from specpool.testing import VOCAB_SIZE, FakeOwnDraft
from specpool.v1 import generation_pb2 as pb

PATIENCE_SECONDS = 15.0
SHORT_SECONDS = 0.2
"""Patience with a call while every answer of the target is wrong."""
SOMETIMES = {"share": 0.4, "rounds": 8}
# Small chunks, so prompts take several rounds; short timeouts, because some workers never answer.
SETTINGS = {"prefill_tokens": 16, "target_timeout_seconds": 0.15, "draft_timeout_seconds": 0.1, "max_batch_size": 4}
WORKER_FAILED = {StatusCode.INTERNAL, StatusCode.UNAVAILABLE}
UNHANDLED = ("internal error", "Traceback", "division", "NoneType")
"""Signs of a bug in the coordinator in the details of an error."""
SAMPLE = ("info_empty", "info_never", "info_huge_memory", "costs_nan", "tokenizer_undecodable", "template_fails")
"""Description faults of the default suite."""
UNUSABLE = {
    "tokenizer_no_json": r"tokenizer\.json is broken",
    "template_does_not_compile": "chat template does not compile",
    "tool_template_does_not_compile": "chat template does not compile",
    "eos_outside_the_vocabulary": "exceeds the model's vocabulary size",
}
"""Tokenizers that no coordinator can use, and what is wrong with them."""


def described(faults: dict[str, dict[str, Any]], *methods: str) -> list[Any]:
    """All description faults that may pass; those outside SAMPLE are slow."""
    names = [name for method in methods for name in faults[method] if name not in UNUSABLE]
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in SAMPLE)) for name in names]


def proposals() -> list[Any]:
    """All proposal faults. Faults that verdicts share are slow."""
    shared = TARGET_FAULTS["Verify"]
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in shared)) for name in DRAFT_FAULTS["Propose"]]


@pytest.fixture(autouse=True)
def only_expected_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Asserts that the coordinator logs no unhandled error; the fakes log their own."""
    caplog.set_level(logging.WARNING)
    yield
    coordinator = [record for record in caplog.records if not record.name.startswith("grpc")]
    assert [record.getMessage() for record in coordinator if record.exc_info] == []


async def outcome(served: Serving, request: pb.GenerateRequest, seconds: float, streaming: bool) -> StatusCode:
    """The status of a call. Asserts right tokens for OK, and an explanation for an error."""
    try:
        async with asyncio.timeout(seconds):
            response = (await stream(served, request))[1] if streaming else await served.stub.Generate(request)
    except TimeoutError:
        return StatusCode.DEADLINE_EXCEEDED
    except grpc.aio.AioRpcError as error:
        return explained(error)
    check_tokens(served.target, request, response)
    if request.sampling_params.HasField("logprobs"):
        assert [each.logprob for each in response.logprobs] == [-1.0] * len(response.token_ids)
        assert all(max(each.top_token_ids) < VOCAB_SIZE for each in response.logprobs)
    return StatusCode.OK


def explained(error: grpc.aio.AioRpcError) -> StatusCode:
    """The status of a failed call. Asserts that the error blames a worker and reveals no bug of the coordinator."""
    assert error.code() in WORKER_FAILED, error.details()
    assert not any(sign in error.details() for sign in UNHANDLED), error.details()
    return error.code()


async def outcomes(served: Serving, seconds: float = PATIENCE_SECONDS) -> set[StatusCode]:
    """The statuses of concurrent requests: long and short prompts, log-probabilities, fixed drafts or none."""
    prompts = [range(i, i + length) for i, length in enumerate((1, 5, 70, 3, 40, 20))]
    requests = [
        make_request(prompt, 16, (None, 4, 0)[i % 3], logprobs=2 * (i % 2) or None) for i, prompt in enumerate(prompts)
    ]
    calls = [outcome(served, request, seconds, i % 2 == 1) for i, request in enumerate(requests)]
    return set(await asyncio.gather(*calls))


async def recovers(served: Serving, *garbage: GarbageTarget | GarbageDraft) -> None:
    """Asserts that all requests succeed once the workers answer correctly."""
    for worker in garbage:
        worker.spoil(None)
    await served.until_ready(wait_for_draft=False)
    assert await outcomes(served) == {StatusCode.OK}
    await served.until_idle()


@pytest.mark.slow
async def test_wrong_verdicts_are_never_served() -> None:
    target = GarbageTarget(fault=None, **SOMETIMES)
    async with serving(target, **SETTINGS) as served:
        for fault in TARGET_FAULTS["Verify"]:
            target.spoil(fault)
            target.spoiled = 0
            assert StatusCode.DEADLINE_EXCEEDED not in await outcomes(served), fault
            assert target.spoiled > 0, fault
            await recovers(served, target)


async def test_wrong_own_drafts_are_never_served() -> None:
    target = GarbageTarget(fault=None, draft=FakeOwnDraft(), **SOMETIMES)
    async with serving(target, with_draft=False, **SETTINGS) as served:
        for fault in OWN_DRAFTS:
            target.spoil(fault)
            target.spoiled = 0
            assert StatusCode.DEADLINE_EXCEEDED not in await outcomes(served), fault
            assert target.spoiled > 0, fault
            await recovers(served, target)


@pytest.mark.slow
async def test_service_recovers_from_a_target_that_is_always_wrong() -> None:
    target = GarbageTarget(fault=None)
    async with serving(target, **SETTINGS) as served:
        for fault in TARGET_FAULTS["Verify"]:
            target.spoil(fault)
            await outcomes(served, SHORT_SECONDS)
            await recovers(served, target)


async def test_transport_errors_fail_no_request() -> None:
    target = GarbageTarget(fault="transport_error", share=0.3)
    async with serving(target, **SETTINGS) as served:
        assert await outcomes(served) == {StatusCode.OK}
        assert target.spoiled > 2


@pytest.mark.parametrize("fault", described(TARGET_FAULTS, "GetWorkerInfo", "GetTokenizer"))
async def test_service_survives_a_wrong_description_of_the_target(fault: str) -> None:
    target = GarbageTarget(fault=fault)
    draft = GarbageDraft(target, fault=None, pass_seconds=lambda rows: 0.0001)
    async with serving(target, draft, with_target=False, num_speculative_tokens=None, **SETTINGS) as served:
        await target.start(served.target_address)
        await served.until(lambda _: target.spoiled)
        await outcomes(served, SHORT_SECONDS)
        await target.stop()
        await served.until(lambda info: info.target.state != "ready")
        target.spoil(None)
        await target.start(served.target_address)
        await recovers(served, target)


@pytest.mark.parametrize("fault", UNUSABLE)
async def test_an_unusable_tokenizer_ends_the_coordinator(fault: str) -> None:
    target = GarbageTarget(fault=fault)
    with pytest.raises(UnusableModelError, match=f"unusable tokenizer: .*{UNUSABLE[fault]}"):  # noqa: PT012 - raised at the end
        async with serving(target, with_target=False, with_draft=False) as served:
            await target.start(served.target_address)
            await served.process.server.wait_stopped()


async def test_chats_with_a_template_that_fails_are_refused() -> None:
    request = pb.GenerateRequest(chat=pb.ChatInput(messages=[{"role": "user", "content": "hello"}]))
    async with serving(GarbageTarget(fault="template_fails"), with_target=False, with_draft=False) as served:
        await served.target.start(served.target_address)
        await served.until(lambda info: served.target.spoiled and info.target.reason != "not connected yet")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(request)
        assert caught.value.code() in {StatusCode.INVALID_ARGUMENT, StatusCode.UNAVAILABLE}


@pytest.mark.parametrize("fault", proposals())
async def test_wrong_proposals_cost_no_request(fault: str) -> None:
    target = GarbageTarget(fault=None, pass_seconds=lambda rows: 0.001)
    # On another device, so the draft worker also drafts ahead.
    draft = GarbageDraft(target, fault=fault, device="other", pass_seconds=lambda rows: 0.0001, **SOMETIMES)
    async with serving(target, draft, num_speculative_tokens=None, **SETTINGS) as served:
        assert await outcomes(served) == {StatusCode.OK}
        assert draft.spoiled > 0
        await recovers(served, draft)


@pytest.mark.parametrize("fault", described(DRAFT_FAULTS, "GetWorkerInfo"))
async def test_wrong_description_of_the_draft_costs_no_request(fault: str) -> None:
    target = GarbageTarget(fault=None)
    draft = GarbageDraft(target, fault=fault)
    async with serving(target, draft, wait_for_draft=False, num_speculative_tokens=None, **SETTINGS) as served:
        await served.until(lambda _: draft.spoiled)
        assert await outcomes(served) == {StatusCode.OK}
        await recovers(served, draft)
