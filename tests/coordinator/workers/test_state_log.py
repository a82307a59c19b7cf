"""The log of a link's states: healthy starts log no warnings, lost workers are warned of at once."""

import logging
from unittest import mock

import pytest

from coordinator.workers import states
from coordinator.workers.states import LinkState, StateLog

REFUSED = "UNAVAILABLE: Connection refused"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    now = mock.Mock(return_value=100.0)
    monkeypatch.setattr(states.time, "monotonic", now)
    return now


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    shown = [(record.levelno, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return shown


@pytest.fixture
def log(clock: mock.Mock, caplog: pytest.LogCaptureFixture) -> StateLog:
    caplog.set_level(logging.INFO)
    return StateLog("target worker at a:1")


def test_a_healthy_start_logs_one_line(log: StateLog, caplog: pytest.LogCaptureFixture) -> None:
    for state, reason in ((LinkState.CONNECTING, REFUSED), (LinkState.LOADING, "importing"), (LinkState.READY, "")):
        log.show(state, reason)
    assert lines(caplog) == [(logging.INFO, "target worker at a:1 is ready")]


def test_an_unreachable_worker_is_warned_of_once_it_had_time_to_listen(
    log: StateLog, clock: mock.Mock, caplog: pytest.LogCaptureFixture
) -> None:
    log.show(LinkState.CONNECTING, REFUSED)
    assert lines(caplog) == []
    clock.return_value += states.LISTEN_SECONDS
    for _ in range(3):
        log.show(LinkState.CONNECTING, REFUSED)
    assert lines(caplog) == [(logging.WARNING, f"target worker at a:1 is connecting: {REFUSED}")]


def test_a_lost_worker_is_warned_of_at_once(log: StateLog, caplog: pytest.LogCaptureFixture) -> None:
    for state in (LinkState.READY, LinkState.CONNECTING, LinkState.READY):
        log.show(state, "")
    assert [level for level, _ in lines(caplog)] == [logging.INFO, logging.WARNING, logging.INFO]
    log.show(LinkState.CONNECTING, "waiting for the target", logging.DEBUG)
    assert lines(caplog) == []
    log.show(LinkState.FAILED, "no such file")
    assert lines(caplog) == [(logging.WARNING, "target worker at a:1 has failed: no such file")]
