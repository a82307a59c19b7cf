"""Log formats, forged lines, floods of lines, and crashes."""

import io
import json
import logging
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
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_all_lines_of_a_process_are_json() -> None:
    ended = run(PROGRAM + "raise ValueError('the end')", "info", "json")
    assert ended.returncode == 1
    events = [json.loads(line) for line in ended.stderr.splitlines()]
    by_message = {event["message"]: (event["logger"], event["level"]) for event in events}
    assert by_message.pop("uncaught exception")[1] == "CRITICAL"
    assert by_message == {"by a library": ("chatty", "WARNING")}


FLOOD = """
import logging, sys
from specpool.rpc.observability.logs import configure_logging
configure_logging("info", sys.argv[1])
for i in range(400):
    try:
        b"\\xff".decode()
    except ValueError:
        logging.getLogger("grpc.server").exception("Invalid encoding on %s", b"secret")
    logging.getLogger("asyncio").error(f"Task failed: secret {i}")
    logging.getLogger("own").warning("number %d", i)
"""


def test_floods_of_lines_are_limited() -> None:
    log = run(FLOOD, "json").stderr
    assert "secret" not in log
    assert log.count("Invalid encoding on %s (<string>:9)") < 10
    assert log.count("number ") < 50


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


STARTED = """
import os, sys
from coordinator.__main__ import main
sys.argv = ["specpool-coordinator", "--version"]
try:
    main()
except SystemExit:
    print(os.environ["GRPC_VERBOSITY"])
"""


def test_processes_silence_grpc_before_they_import_it() -> None:
    assert run(STARTED).stdout.splitlines()[-1] == "NONE"
