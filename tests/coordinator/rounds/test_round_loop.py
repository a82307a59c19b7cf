"""Errors in group selection fail the requests involved, and nothing else."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from serving import RecordingTarget, make_request, serving

from coordinator.scheduling.grouping import Group, Ragged
from coordinator.scheduling.prefixes import PrefixIndex
from coordinator.scheduling.sequence import GenerationRequest, Sequence


def fail(*_: object) -> Any:
    raise ZeroDivisionError("told to fail")


def choose_unknown_sequence(*_: object) -> Group:
    return Group([Sequence(0, GenerationRequest("?", (1,), 1, frozenset(), 0))])


@pytest.mark.parametrize(
    ("owner", "method", "broken", "trace"),
    [
        (Ragged, "choose", fail, "ZeroDivisionError: told to fail"),
        (Ragged, "choose", choose_unknown_sequence, "ValueError: a group"),
        (Ragged, "admissible", fail, "ZeroDivisionError: told to fail"),
        (PrefixIndex, "add", fail, "ZeroDivisionError: told to fail"),
    ],
)
async def test_errors_in_group_selection_fail_their_requests_and_not_the_service(
    owner: type,
    method: str,
    broken: Callable[..., Any],
    trace: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(max_num_seqs=2) as served:
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, broken)
            calls = [asyncio.ensure_future(served.expect(make_request([i]))) for i in range(3)]
            errors = await asyncio.gather(*calls, return_exceptions=True)
        for error in errors:
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() is grpc.StatusCode.INTERNAL
            assert trace not in str(error.details())
        served.process.coordinator.lanes.first.window.check_integrity()
        counters = served.process.coordinator.counters
        assert 1 <= counters.grouping_errors <= 3
        assert caplog.text.count("Traceback") == caplog.text.count(trace) == counters.grouping_errors
        await served.expect(make_request())
        info = await served.until_idle()
        assert dict(info.counters.finished) == {"error": 3, "length": 1}


async def test_errors_in_admission_fail_running_sequences_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have been in that round. Requests that stay in the queue are unaffected."""
    async with serving(RecordingTarget(max_rounds_ahead=0), max_num_seqs=2) as served:
        served.target.open.clear()
        running = [asyncio.ensure_future(served.expect(make_request([i], 100))) for i in (1,)]
        await served.until(lambda info: info.running == 1)
        newcomers = [asyncio.ensure_future(served.expect(make_request([i], 100))) for i in range(5, 8)]
        await served.until(lambda info: info.queued == 3)
        faults = iter([fail])
        admissible = Ragged.admissible

        def fail_once(*arguments: Any) -> int:
            return next(faults, admissible)(*arguments)

        monkeypatch.setattr(Ragged, "admissible", fail_once)
        served.target.open.set()
        ended = await asyncio.gather(*running, *newcomers, return_exceptions=True)
        failed, *others = [isinstance(end, grpc.aio.AioRpcError) for end in ended]
        assert failed
        assert sorted(others) == [False, False, True]  # concurrent requests arrive in any order
        await served.until_idle()
