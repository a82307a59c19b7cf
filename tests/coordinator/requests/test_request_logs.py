"""Request logs have request ids, and no prompts or outputs."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from serving import RecordingTarget, make_request, refusal, serving, stream
from template_target import TemplateTarget

from coordinator.prompts.prompt_reader import PromptReader
from coordinator.scheduling.round import Round
from specpool.rpc.observability.logs import JsonFormatter
from specpool.v1 import generation_pb2 as pb

CANARY = "yellow bird"
# A chat template that quotes the prompt in its errors.
QUOTING = (
    "{% set said = messages[0]['content'] %}"
    "{% if messages[0]['role'] == 'odd' %}{{ raise_exception(said) }}{% else %}{{ {}[said].x }}{% endif %}"
)
INJECTED = "one\n2026-01-01T00:00:00 ERROR two"


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """All log lines of this process, as JSON."""
    log, lines = logging.getLogger(), io.StringIO()
    handler, level = logging.StreamHandler(lines), log.level
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)


def events(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def chat(role: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role=role, content=CANARY)]))


async def test_prompts_are_never_logged(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.rpc.server.interceptor.LOG_SECONDS", 0.0)  # each refusal is logged
    async with serving(TemplateTarget(QUOTING)) as served:
        for role in ("odd", "user"):
            assert CANARY in (await refusal(served.stub.Generate(chat(role)))).details()
        await served.stub.Generate(pb.GenerateRequest(text=CANARY, sampling_params=pb.SamplingParams(stop=[CANARY])))
        await stream(served, pb.GenerateRequest(text=CANARY))
        await refusal(served.stub.Generate(pb.GenerateRequest(text=CANARY * 100_000)))

        def fail(*_: Any) -> None:
            raise KeyError(CANARY)

        monkeypatch.setattr(PromptReader, "check", fail)
        await refusal(served.stub.Generate(pb.GenerateRequest(request_id="broken", text=CANARY)))
    assert CANARY not in written.getvalue()
    messages = [event["message"] for event in events(written)]
    assert sum("the last one in INVALID_ARGUMENT: 'chat.messages'" in message for message in messages) == 2, messages
    (broken,) = [event for event in events(written) if event["message"].startswith("internal error")]
    assert broken["request_id"] == "broken"
    assert "WithheldError: KeyError" in broken["exception"]


async def test_lines_have_the_ids_of_their_requests(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    target = RecordingTarget()
    async with serving(target) as served:
        await served.stub.Generate(make_request(request_id=INJECTED))
        target.open.clear()
        calls = [
            asyncio.ensure_future(served.stub.Generate(make_request([i], 20, request_id=f"r{i}"))) for i in range(2)
        ]
        await served.until(lambda info: info.running + info.queued == 2)

        def fail(*_: Any) -> None:
            raise ValueError("told to fail")

        monkeypatch.setattr(Round, "commit", fail)
        target.open.set()
        for call in calls:
            await refusal(call)
    named: dict[str, list[Any]] = {}
    for event in events(written):
        ids = event.get("request_ids", [event["request_id"]] if "request_id" in event else [])
        named.setdefault(event["message"].split(":")[0], []).append(ids)
    assert sorted(named.pop("request finished")) == [[INJECTED], ["r0"], ["r1"]]
    failed = [each for ids in named.pop("round failed") for each in ids]
    assert sorted(failed) == ["r0", "r1"]
    assert named.pop("1 calls ended in an error; the last one in INTERNAL") in ([["r0"]], [["r1"]])
    assert not any(ids for all_ids in named.values() for ids in all_ids)


async def test_the_line_of_a_stalled_stream_has_its_request_id(written: io.StringIO) -> None:
    async with serving(with_draft=False, stream_stall_seconds=0.1) as served:
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(served.address, options=options) as channel:
            method = "/specpool.v1.GenerationService/GenerateStream"
            request = make_request([1], 1200, k=0, request_id="unread")
            call = channel.unary_stream(method)(request.SerializeToString(), timeout=20)
            await anext(aiter(call))
            await served.until(lambda info: info.running == 0)
            call.cancel()
    (ended,) = [event for event in events(written) if event["message"].startswith("ending a stream of")]
    assert ended["request_id"] == "unread"
