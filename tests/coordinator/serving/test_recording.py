"""Recordings of a running coordinator: a share of the complete answers, without text or names."""

import asyncio
import errno
import json
import logging
import os
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from pydantic import ValidationError
from scraping import scrape
from serving import PATIENCE_SECONDS, RecordingTarget, Serving, make_request, serving

from coordinator.config.settings import CoordinatorSettings
from coordinator.recording import recorder
from coordinator.recording.recorder import is_selected
from coordinator.recording.shard_writer import ShardWriter
from specpool.protocol.recordings import RecordedAnswer, read_shard, shards_in
from specpool.rpc.ports import free_port
from specpool.v1 import generation_pb2 as pb

ANNE, BOB = (("client", "anne"),), (("client", "bob"),)
PROMPT, SECRET = list(b"a secret prompt"), "request-of-anne"


def answers_in(folder: Path) -> list[RecordedAnswer]:
    return [answer for path in shards_in(folder) if (shard := read_shard(path)) for answer in shard[1]]


async def settled(served: Serving, count: int) -> dict[str, int]:
    """Wait for `count` results. Return the nonzero numbers by result."""
    assert served.process.coordinator.recorder is not None
    results = served.process.coordinator.recorder.results
    async with asyncio.timeout(PATIENCE_SECONDS):
        while sum(results.values()) < count:  # noqa: ASYNC110 - the recorder has no event for it
            await asyncio.sleep(0.01)
    return {result: number for result, number in results.items() if number}


@pytest.mark.usefixtures("clients_by_metadata")
async def test_complete_answers_are_recorded_and_nothing_else(tmp_path: Path) -> None:
    async with serving(RecordingTarget(eos_rate=0.02), record=tmp_path) as served:
        requests = [make_request([*PROMPT, number], 30, request_id=f"{SECRET}-{number}") for number in range(6)]
        requests += [make_request(PROMPT, 9, temperature=0.8, seed=5, n=3)]
        calls = [served.stub.Generate(each, metadata=ANNE if i % 2 else BOB) for i, each in enumerate(requests)]
        responses = await asyncio.gather(*calls)
        expected = [tuple(each.token_ids) for response in responses for each in (response, *response.other_samples)]
        assert await settled(served, len(expected)) == {"recorded": len(expected)}
        info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
    answers = answers_in(tmp_path)
    assert sorted(answer.token_ids for answer in answers) == sorted(expected)
    assert len({answer.client for answer in answers}) == 2
    (path,) = shards_in(tmp_path)
    assert path.suffix == ".jsonl"
    content = path.read_bytes()
    shard = read_shard(path)
    assert shard is not None
    assert shard[0].tokenizer_fingerprint == info.target.tokenizer_fingerprint
    prompt_ids = json.dumps(PROMPT, separators=(",", ":"))[1:-1].encode()
    for secret in (b"anne", b"bob", SECRET.encode(), bytes(PROMPT), prompt_ids):
        assert secret not in content


async def test_incomplete_and_salted_answers_are_not_recorded(tmp_path: Path) -> None:
    target = RecordingTarget(pass_seconds=lambda rows: 0.005)
    async with serving(target, record=tmp_path) as served:
        aborted = served.stub.Generate(make_request([1], 2000, request_id="aborted", ignore_eos=True))
        cancelled = served.stub.Generate(make_request([2], 2000, ignore_eos=True))
        await served.until(lambda info: info.counters.completion_tokens > 8)
        await served.stub.Abort(pb.AbortRequest(request_id="aborted"))
        assert (await aborted).finish_reason == "abort"
        cancelled.cancel()
        salted = make_request([3], 5)
        salted.cache_salt = "salt"
        await served.stub.Generate(salted)
        await served.until_idle()
        response = await served.stub.Generate(make_request([4], 5))
        assert await settled(served, 1) == {"recorded": 1}
    assert [answer.token_ids for answer in answers_in(tmp_path)] == [tuple(response.token_ids)]


async def test_a_share_of_the_answers_is_recorded(tmp_path: Path) -> None:
    async with serving(record=tmp_path, record_share=0.25) as served:
        responses = [await served.stub.Generate(make_request([number], 5)) for number in range(20)]
        expected = [tuple(each.token_ids) for number, each in enumerate(responses) if is_selected(number, 0.25)]
        await settled(served, len(expected))
    assert 4 <= len(expected) <= 6
    assert [answer.token_ids for answer in answers_in(tmp_path)] == expected


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 1.0])
def test_selected_answers_are_spread_evenly(share: float) -> None:
    for stride in (1, 2, 7, 10):  # for traffic with any period
        selected = sum(is_selected(number * stride, share) for number in range(10_000))
        assert selected == pytest.approx(10_000 * share, abs=60)


async def test_serving_continues_with_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, full = os.open, True

    def open_on_full_disk(path: Any, *flags: Any, **others: Any) -> int:
        if full and str(path).startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *flags, **others)

    monkeypatch.setattr(os, "open", open_on_full_disk)
    async with serving(record=tmp_path, metrics_port=(port := free_port())) as served:
        for number in range(5):
            await served.expect(make_request([number], 5))
        assert await settled(served, 5) == {"disk_error": 5}
        full = False
        await served.expect(make_request([5], 5))
        assert await settled(served, 6) == {"disk_error": 6}  # not retried for each answer
        assert served.process.coordinator.recorder is not None
        served.process.coordinator.recorder._retry_at = 0.0
        last = await served.stub.Generate(make_request([6], 5))
        assert await settled(served, 7) == {"disk_error": 6, "recorded": 1}
        samples = (await scrape(port)).families["specpool:recorded_answers"].samples
        assert {sample.labels["result"]: sample.value for sample in samples} == {
            "disk_error": 6,
            "recorded": 1,
            "queue_full": 0,
        }
    assert [answer.token_ids for answer in answers_in(tmp_path)] == [tuple(last.token_ids)]
    warnings = [each for each in caplog.records if each.name == recorder.__name__ and each.levelno >= logging.WARNING]
    assert [each.getMessage() for each in warnings] == [
        f"recording answers in {tmp_path} failed ([Errno 28] No space left on device); retrying every 30 s"
    ]


async def test_a_slow_disk_drops_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, append = Event(), ShardWriter.append

    def wait(writer: ShardWriter, *arguments: Any) -> None:
        assert disk.wait(PATIENCE_SECONDS)
        append(writer, *arguments)

    monkeypatch.setattr(ShardWriter, "append", wait)
    monkeypatch.setattr(recorder, "MAX_WAITING_TOKENS", 2 * (10 + recorder.ANSWER_TOKENS))
    async with serving(record=tmp_path) as served:
        for number in range(5):
            await served.expect(make_request([number], 10, ignore_eos=True))
        assert await settled(served, 3) == {"queue_full": 3}
        disk.set()
        assert await settled(served, 5) == {"queue_full": 3, "recorded": 2}
    assert len(answers_in(tmp_path)) == 2


async def test_a_stuck_disk_does_not_delay_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Event()
    monkeypatch.setattr(ShardWriter, "append", lambda writer, *arguments: disk.wait(PATIENCE_SECONDS))
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 0.01)
    async with serving(record=tmp_path) as served:
        await served.expect(make_request([1], 5))
    disk.set()
    assert "failed to write the last recorded answers within 0.01 s" in caplog.text


async def test_an_unusable_directory_fails_no_request() -> None:
    async with serving(record=Path("/proc/recording")) as served:
        await served.expect(make_request([1], 5))
        assert await settled(served, 1) == {"disk_error": 1}


async def test_nothing_is_recorded_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with serving() as served:
        await served.expect(make_request([1], 5))
        assert served.process.coordinator.recorder is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record_share": 0.1}, "record_share needs --record"),
        ({"record": __file__}, "test_recording.py is not a directory"),
        ({"record": ""}, "record\n.* must not be empty"),
        ({"record": ".", "record_share": 0}, "record_share"),
        ({"record": ".", "record_max_bytes": "1MiB"}, "record_max_bytes"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CoordinatorSettings(**settings)
