"""The log of a child process reaches our stderr unchanged, and its last line tells why the process ended."""

import subprocess
import sys

import pytest

from specpool.cli.processes import ChildLog


def ending(script: str) -> str:
    """How the log describes the end of a Python script."""
    log = ChildLog()
    child = subprocess.Popen([sys.executable, "-c", script], stderr=log.writing)
    log.follow()
    return log.ending(child.wait())


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import sys; sys.exit('specpool-draft-worker: model: /x: no such file')", "model: /x: no such file"),
        ("import sys; sys.exit('2026-11-23T20:24:23 ERROR draft-worker a.b: rank 1 has ended')", "rank 1 has ended"),
        ('import sys; sys.exit(\'{"level": "ERROR", "message": "specpool-x: no: space"}\')', "no: space"),
        ("raise ValueError('x: y')", "ValueError: x: y"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("import sys; print('a line', file=sys.stderr)", "ended with status 0"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL; is there enough memory?"),
        ("import os; os.kill(os.getpid(), 15)", "killed by SIGTERM"),
    ],
)
def test_the_end_of_a_process_is_described_in_one_line(script: str, expected: str) -> None:
    assert ending(script) == expected


def test_all_lines_are_copied(capfd: pytest.CaptureFixture[str]) -> None:
    ending("import os; os.write(2, b'one\\ntwo\\n\\nlast')")
    assert capfd.readouterr().err == "one\ntwo\n\nlast"


def test_a_closed_stderr_does_not_stop_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("specpool.cli.processes.os.write", broken)
    assert ending("import sys; sys.stderr.write(100_000 * 'line\\n'); sys.exit('the end')") == "the end"
