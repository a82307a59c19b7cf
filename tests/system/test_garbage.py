"""Workers that answer garbage: never wrong tokens with OK, no call that hangs, and not the end of the service."""

import asyncio
import logging

import grpc
import pytest
from grpc import StatusCode
from serving import Serving, check_tokens, make_request, serving, stream
from specpool.testing.faults import Fault

from specpool.testing import DRAFT_FAULTS, TARGET_FAULTS, VOCAB_SIZE, GarbageDraft, GarbageTarget
from specpool.v1 import generation_pb2 as pb

AT_LEAST = 20
"""Kinds of garbage that each worker must offer."""
PATIENCE_SECONDS = 15.0
# What a call may take while every answer of its target is garbage.
SHORT_SECONDS = 0.2
NOW_AND_THEN = {"share": 0.4, "rounds": 8}
# Chunks of prompts are rounds too; a worker that never answers is given up soon.
SETTINGS = {"prefill_tokens": 16, "target_timeout_seconds": 0.15, "draft_timeout_seconds": 0.1, "max_batch_size": 4}
# Errors of a worker as `docs/api.md` has them.
WORKER_FAILED = {StatusCode.INTERNAL, StatusCode.UNAVAILABLE}
# Faults of ours, which the server's log explains.
UNHANDLED = ("internal error", "Traceback", "division", "NoneType")


def names(faults: dict[str, Fault], *methods: str) -> list[str]:
    return [name for name, fault in faults.items() if fault.method in methods]


def some_requests() -> list[pb.GenerateRequest]:
    """Requests of which some have prompts of several chunks, log-probabilities, drafts of a fixed length or none."""
    prompts = [range(i, i + length) for i, length in enumerate((1, 5, 70, 3, 40, 20))]
    return [
        make_request(prompt, 16, (None, 4, 0)[i % 3], logprobs=2 if i % 2 else None) for i, prompt in enumerate(prompts)
    ]


async def outcome(served: Serving, request: pb.GenerateRequest, seconds: float, streaming: bool = False) -> StatusCode:
    """The status of a call. Asserts that the tokens are right if it is OK, and that it explains itself if not."""
    try:
        async with asyncio.timeout(seconds):
            response = (await stream(served, request))[1] if streaming else await served.stub.Generate(request)
    except TimeoutError:
        return StatusCode.DEADLINE_EXCEEDED
    except grpc.aio.AioRpcError as error:
        return explained(error)
    check_tokens(served.target, request, response)
    if request.sampling_params.HasField("logprobs"):
        assert [found.logprob for found in response.logprobs] == [-1.0] * len(response.token_ids)
        assert all(max(found.top_token_ids) < VOCAB_SIZE for found in response.logprobs)
    return StatusCode.OK


def explained(error: grpc.aio.AioRpcError) -> StatusCode:
    """The status of a failed call. Asserts that it is a worker's failure, and no fault of ours."""
    assert error.code() in WORKER_FAILED, error.details()
    assert not any(sign in error.details() for sign in UNHANDLED), error.details()
    return error.code()


async def outcomes(served: Serving, seconds: float) -> set[StatusCode]:
    """The statuses of several requests at once."""
    calls = [outcome(served, request, seconds, i % 2 == 1) for i, request in enumerate(some_requests())]
    return set(await asyncio.gather(*calls))


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    """Asserts that no error of ours was unhandled; the fakes hold their coordinator to the protocol, and log that."""
    ours = [record for record in caplog.records if not record.name.startswith("grpc")]
    assert [record.getMessage() for record in ours if record.exc_info] == []


def test_there_are_many_kinds_of_garbage() -> None:
    assert len(names(TARGET_FAULTS, "Verify")) >= AT_LEAST
    assert len(names(DRAFT_FAULTS, "Propose")) >= AT_LEAST
    for fault in (*TARGET_FAULTS.values(), *DRAFT_FAULTS.values()):
        assert fault.description.endswith(".")
        assert "\n" not in fault.description
    with pytest.raises(KeyError, match="no_such_fault"):
        GarbageTarget(fault="no_such_fault")


async def test_the_share_and_number_of_spoiled_answers_are_those_asked_for() -> None:
    target = GarbageTarget(fault="huge_times", share=0.5, rounds=10)
    async with serving(target, with_draft=False, **SETTINGS) as served:
        assert await outcomes(served, PATIENCE_SECONDS) == {StatusCode.OK}
        assert (target.spoiled, target.calls > 20) == (10, True)


@pytest.mark.parametrize("fault", names(TARGET_FAULTS, "Verify"))
async def test_garbage_of_the_target_is_never_served(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    target = GarbageTarget(fault=fault, **NOW_AND_THEN)
    async with serving(target, **SETTINGS) as served:
        assert StatusCode.DEADLINE_EXCEEDED not in await outcomes(served, PATIENCE_SECONDS)
        assert target.spoiled > 0
        target.share, target.rounds = 1.0, None
        await outcomes(served, SHORT_SECONDS)
        target.spoil(None)
        await served.until_ready(wait_for_draft=False)
        assert await outcomes(served, PATIENCE_SECONDS) == {StatusCode.OK}
        await served.until_idle()
    check_log(caplog)


async def test_errors_of_the_transport_cost_no_request() -> None:
    target = GarbageTarget(fault="internal_error_of_the_transport", share=0.3)
    async with serving(target, **SETTINGS) as served:
        assert await outcomes(served, PATIENCE_SECONDS) == {StatusCode.OK}
        assert target.spoiled > 2


@pytest.mark.parametrize("fault", names(TARGET_FAULTS, "GetWorkerInfo", "GetTokenizer"))
async def test_a_target_that_describes_itself_wrongly_is_not_believed(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    target = GarbageTarget(fault=fault)
    draft = GarbageDraft(target, fault=None, pass_seconds=lambda rows: 0.0001)
    async with serving(target, draft, with_target=False, num_speculative_tokens=None, **SETTINGS) as served:
        await target.start(served.target_address)
        await served.until(lambda _: target.spoiled)
        await outcomes(served, SHORT_SECONDS)
        await served.info()
        await target.stop()
        await served.until(lambda info: info.target.state != "ready")
        target.spoil(None)
        await target.start(served.target_address)
        await served.until_ready(wait_for_draft=False)
        assert await outcomes(served, PATIENCE_SECONDS) == {StatusCode.OK}
        await served.until_idle()
    check_log(caplog)


@pytest.mark.parametrize("fault", ["template_does_not_compile", "template_fails"])
async def test_a_chat_that_a_broken_template_cannot_render_is_refused_with_a_reason(fault: str) -> None:
    request = pb.GenerateRequest(chat=pb.ChatInput(messages=[{"role": "user", "content": "hello"}]))
    async with serving(GarbageTarget(fault=fault), with_target=False, with_draft=False) as served:
        await served.target.start(served.target_address)
        await served.until(lambda info: served.target.spoiled and info.target.reason != "not connected yet")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(request)
        assert caught.value.code() in {StatusCode.INVALID_ARGUMENT, StatusCode.UNAVAILABLE}


@pytest.mark.parametrize("fault", names(DRAFT_FAULTS, "Propose"))
async def test_garbage_of_the_draft_costs_no_request(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    target = GarbageTarget(fault=None, pass_seconds=lambda rows: 0.001)
    # On another device, so that it also drafts ahead.
    draft = GarbageDraft(target, fault=fault, device="other", pass_seconds=lambda rows: 0.0001, **NOW_AND_THEN)
    async with serving(target, draft, num_speculative_tokens=None, **SETTINGS) as served:
        assert await outcomes(served, PATIENCE_SECONDS) == {StatusCode.OK}
        draft.share, draft.rounds = 1.0, None
        assert await outcomes(served, PATIENCE_SECONDS) == {StatusCode.OK}
        assert draft.spoiled > 0
        draft.spoil(None)
        assert await outcomes(served, PATIENCE_SECONDS) == {StatusCode.OK}
        await served.until_idle()
    check_log(caplog)


@pytest.mark.parametrize("fault", names(DRAFT_FAULTS, "GetWorkerInfo"))
async def test_a_draft_that_describes_itself_wrongly_costs_no_request(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    target = GarbageTarget(fault=None)
    draft = GarbageDraft(target, fault=fault)
    async with serving(target, draft, wait_for_draft=False, num_speculative_tokens=None, **SETTINGS) as served:
        await served.until(lambda _: draft.spoiled)
        assert await outcomes(served, PATIENCE_SECONDS) == {StatusCode.OK}
        await served.info()
        draft.spoil(None)
        assert await outcomes(served, PATIENCE_SECONDS) == {StatusCode.OK}
    check_log(caplog)
