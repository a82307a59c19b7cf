"""Log formats, forged lines, and lines from native libraries."""

import io
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from specpool.rpc.observability import logs
from specpool.rpc.observability.logs import JsonFormatter, TextFormatter

FORGED = "2026-01-01T00:00:00 ERROR specpool.rpc.server.server: forged"


@contextmanager
def logging_as(formatter: logging.Formatter) -> Iterator[tuple[logging.Logger, Callable[[], list[str]]]]:
    """Yield a logger, and a function that returns its lines."""
    written, log = io.StringIO(), logging.getLogger("tests.logs")
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter)
    log.addHandler(handler)
    yield log, lambda: written.getvalue().splitlines()
    log.removeHandler(handler)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_json_lines_have_timestamp_level_logger_and_message() -> None:
    with logging_as(JsonFormatter()) as (log, lines):
        log.warning("%d of %s", 3, "ü\n}", exc_info=raised(ValueError("a\nb")))
        (line,) = lines()
    event = json.loads(line)
    assert event.pop("exception").endswith("ValueError: a\nb")
    moment = datetime.fromisoformat(event.pop("timestamp"))
    assert moment.utcoffset() == timedelta(0)
    assert event == {"level": "WARNING", "logger": "tests.logs", "message": "3 of ü\n}"}


def test_lines_name_the_process() -> None:
    with logging_as(JsonFormatter("draft-worker")) as (log, lines):
        log.warning("a")
        assert json.loads(lines()[0])["process"] == "draft-worker"
    with logging_as(TextFormatter("draft-worker")) as (log, lines):
        log.warning("a")
        assert lines()[0].endswith(" WARNING draft-worker tests.logs: a")


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()], ids=["json", "text"])
def test_lines_cannot_be_forged(formatter: logging.Formatter) -> None:
    for end in ("\n", "\r", "\r\n", "\x0b", "\x85", "\u2028", "\x1b[2J"):
        with logging_as(formatter) as (log, lines):
            log.warning("a %s", f"{end}{FORGED}", extra=logs.about(f"b{end}{FORGED}"))
            log.error("c", exc_info=raised(ValueError(f"d{end}{FORGED}")))
            written = lines()
        assert all(line.isprintable() for line in written)
        assert not any(line.startswith(FORGED) for line in written)
        assert sum(not line.startswith("    ") for line in written) == 2


def test_text_lines_end_with_their_requests() -> None:
    def end_of(*request_ids: str) -> str:
        with logging_as(TextFormatter()) as (log, lines):
            log.warning("it", extra=logs.about(*request_ids))
            return lines()[0].partition("WARNING tests.logs: ")[2]

    assert end_of() == "it"
    assert end_of("a-1") == "it [request_id=a-1]"
    assert end_of("a", "b", "a") == "it [request_ids=a,b]"
    assert end_of('x] "y') == 'it [request_id="x] \\"y"]'
    assert end_of("a" * 200) == f"it [request_id={'a' * logs.MAX_ID_CHARACTERS}]"


def test_requests_and_trace_end_with_their_context() -> None:
    with logging_as(JsonFormatter()) as (log, lines):
        with logs.BoundRequests(lambda: ["a", "b"]), logs.bound_trace("f00"):
            log.warning("within")
        log.warning("after")
        within, after = map(json.loads, lines())
    assert (within["request_ids"], within["trace_id"]) == (["a", "b"], "f00")
    assert not {"request_ids", "request_id", "trace_id"} & after.keys()


def test_withheld_errors_keep_type_and_traceback() -> None:
    with logging_as(JsonFormatter()) as (log, lines):
        log.error("it", exc_info=logs.without_message(raised(KeyError("secret"))))
        event = json.loads(lines()[0])
    assert "secret" not in event["exception"]
    assert event["exception"].endswith("WithheldError: KeyError")
    assert "in raised" in event["exception"]


PROGRAM = """
import logging, os, sys
logging.getLogger("chatty").addHandler(logging.StreamHandler())
from specpool.rpc.observability.logs import configure_logging
configure_logging(*sys.argv[1:])
logging.getLogger("chatty").warning("by a library")
os.write(2, b"I1122 18:07:39.248465 26806 chttp2_transport.cc:1403] gone\\nW1122 2 3 a.cc:1] odd\\n"
            b"thread 'a' panicked at src/b.rs:2:5:\\nwithin a prompt\\n")
print("printed", file=sys.stderr)
"""
ENDINGS = {"sys.exit('the end')": "the end", "raise ValueError('the end')": "uncaught exception"}


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_all_lines_of_a_process_are_json(ending: str) -> None:
    ended = run(PROGRAM + ending, "info", "json")
    assert ended.returncode == 1
    events = [json.loads(line) for line in ended.stderr.splitlines()]
    by_message = {event["message"]: (event["logger"], event["level"]) for event in events}
    assert by_message.pop(ENDINGS[ending])[1] == ("CRITICAL" if "raise" in ending else "WARNING")
    assert by_message == {
        "by a library": ("chatty", "WARNING"),
        "chttp2_transport.cc:1403: 1 line, 58 bytes": ("stderr", "INFO"),
        "a.cc:1: 1 line, 21 bytes": ("stderr", "WARNING"),
        "panic at b.rs:2: 1 line, 36 bytes": ("stderr", "WARNING"),
        "other: 1 line, 15 bytes": ("stderr", "WARNING"),
        "printed": ("stderr", "WARNING"),
    }


def test_native_lines_show_their_text_only_at_debug_level() -> None:
    texts = {level: run(PROGRAM, level, "text").stderr for level in ("info", "debug")}
    for secret in ("gone", "odd", "within a prompt"):
        assert secret not in texts["info"]
        assert f"stderr: {secret}" in texts["debug"].replace("] ", "stderr: ")
    assert "WARNING stderr: a.cc:1: 1 line, 21 bytes\n" in texts["info"]
    assert "printed\n" in texts["info"]


FLOOD = """
import logging, os, sys, time
from specpool.rpc.observability.logs import configure_logging
configure_logging("info", sys.argv[1])
for i in range(400):
    os.write(2, b"E1122 18:07:39.248465 26806 parser.cc:7] secret\\n")
    try:
        b"\\xff".decode()
    except ValueError:
        logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", b"secret")
    logging.getLogger("asyncio").error(f"Task failed: secret {i}")
    logging.getLogger("own").warning("number %d", i)
time.sleep(1.1)
logging.getLogger("own").warning("end")
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_floods_of_lines_are_summed_up(log_format: str) -> None:
    log = run(FLOOD, log_format).stderr
    assert "secret" not in log
    assert log.count("Invalid encoding on %s (<string>:10)") < 10
    assert log.count("number ") < 50
    numbers = [int(number) for number in re.findall(r"parser\.cc:7: (\d+) lines?", log)]
    assert sum(numbers) == 400
    assert len(numbers) < 10


def test_lines_of_ranks_keep_their_text() -> None:
    program = """
import os
from specpool.rpc.observability.logs import configure_logging
configure_logging("info")
os.write(2, b"2026-11-23T10:00:00 ERROR rank a.b: failed\\nTraceback (most recent call last):\\n  File it\\nother\\n")
"""
    assert re.sub(r"^\S+ ", "", run(program).stderr, flags=re.MULTILINE) == (
        "ERROR stderr: rank a.b: failed\nWARNING stderr: Traceback (most recent call last):\n"
        "WARNING stderr:   File it\nWARNING stderr: other: 1 line, 5 bytes\n"
    )


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_stack_traces_on_stderr_are_complete(log_format: str) -> None:
    ended = run(
        """
import os, sys
from specpool.rpc.observability.logs import configure_logging
configure_logging("info", sys.argv[1])
trace = "Traceback (most recent call last):" + chr(10) + ("  File it" + chr(10)) * 50 + "ValueError: "
os.write(2, ("2026-11-23T10:00:00 ERROR rank 1: failed" + chr(10) + trace + "of a rank" + chr(10)).encode())
print(trace + "in Python", file=sys.stderr)
""",
        log_format,
    )
    assert "ValueError: of a rank" in ended.stderr
    assert "ValueError: in Python" in ended.stderr


def test_native_crashes_log_the_stack() -> None:
    crash = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()"
    ended = run(PROGRAM + crash, "info", "json")
    assert ended.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in ended.stderr


LOGS_ONE_LINE = """
import logging, time
from specpool.rpc.observability.logs import configure_logging
configure_logging("info", "json")
lines = []
logging.root.handlers[0].addFilter(lambda record: lines.append(record) or True)
logging.info("lost")
time.sleep(0.2)
print(len(lines))
"""


def test_write_errors_are_not_logged() -> None:
    """Reporting a closed stderr or a full disk on stderr would loop."""
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", LOGS_ONE_LINE], stdout=subprocess.PIPE, stderr=full, timeout=60, check=True
        )
    assert ended.stdout == b"1\n"
