"""The log of a process: one event per line on stderr, as text or JSON, with the event's requests and trace.

Text from clients or other processes cannot forge a line.
"""

import faulthandler
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from typing import Any, Literal, NoReturn, TextIO

from specpool.rpc.observability.line_limits import RecordLimit, without_message

LogFormat = Literal["text", "json"]

MAX_ID_CHARACTERS = 128
MAX_IDS = 64
"""Maximum number of request ids in one line."""

_NO_REQUESTS: Callable[[], Iterable[str]] = tuple
_requests: ContextVar[Callable[[], Iterable[str]]] = ContextVar("requests", default=_NO_REQUESTS)
"""Ids of the requests that the running task serves."""
_trace_id: ContextVar[str] = ContextVar("trace_id", default="")

_PLAIN_ID = re.compile(r"[\w.:/+-]+", re.ASCII)
# Characters that could end a line or control a terminal, except the tab.
_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(9), *range(10, 32), *range(127, 160), 0x2028, 0x2029)}
_CONTROLS_IN_TRACES = {code: text for code, text in _CONTROLS.items() if code != ord("\n")}


def bind_request(request_id: str) -> None:
    """Attach a request to all further log lines of the running task."""
    _requests.set(lambda: (request_id,))


class BoundRequests:
    """Context manager that attaches requests to log lines. The ids are computed only when a line is logged.

    Tasks started in the context may outlive it, such as an open stream. Their later lines belong to no request.
    """

    def __init__(self, request_ids: Callable[[], Iterable[str]]) -> None:
        self._request_ids = request_ids

    def __enter__(self) -> None:
        self._token: Token[Any] = _requests.set(self._ids)

    def __exit__(self, *_: object) -> None:
        _requests.reset(self._token)
        self._request_ids = _NO_REQUESTS

    def _ids(self) -> Iterable[str]:
        return self._request_ids()


@contextmanager
def bound_trace(trace_id: str) -> Iterator[None]:
    """Context manager that attaches a trace to log lines."""
    token = _trace_id.set(trace_id)
    try:
        yield
    finally:
        _trace_id.reset(token)


def bind_trace(trace_id: str) -> None:
    """Attach a trace to all further log lines of the running task."""
    _trace_id.set(trace_id)


def about(*request_ids: str) -> dict[str, Any]:
    """Return the argument `extra` of a log line that belongs to these requests."""
    return {"request_ids": request_ids}


def configure_logging(level: str, log_format: LogFormat = "text", program: str = "") -> None:
    """Log to stderr, one event per line, including the loggers of libraries.

    `program`: each line shows its name, without the prefix "specpool-".
    """
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    handler, process = StderrHandler(), program.removeprefix("specpool-")
    handler.setFormatter(TextFormatter(process))
    threading.excepthook = _log_uncaught_in_thread
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
        sys.excepthook = lambda _, error, __: logging.getLogger(__name__).critical("uncaught exception", exc_info=error)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("grpc").setLevel(logging.INFO)  # at debug level it logs each step of its event loop
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and any(isinstance(h, logging.StreamHandler) for h in logger.handlers):
            logger.handlers.clear()
            logger.propagate = True


def end_process(reason: str, status: int) -> NoReturn:
    """Exit. The last line on stderr is the reason, in the format of the log."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers):
        logging.getLogger(__name__).critical("%s", reason)
    else:
        print(reason, file=sys.stderr)
    raise SystemExit(status)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr, within the limits on lines that callers can cause.

    Drops lines that cannot be written. Reporting them on stderr would loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limit = RecordLimit()

    def emit(self, record: logging.LogRecord) -> None:
        if (shown := self._limit.shown(record)) is not None:
            super().emit(shown)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report records that cannot be formatted."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class TextFormatter(logging.Formatter):
    """Formats as `TIME LEVEL PROCESS LOGGER: MESSAGE [request_id=... trace_id=...]` and indents stack traces."""

    def __init__(self, process: str = "") -> None:
        """`process`: name of this process; empty: show none."""
        name = f"{process} " if process else ""
        super().__init__(f"%(asctime)s %(levelname)s {name}%(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record).translate(_CONTROLS)
        fields = " ".join(f"{name}={_quoted(value)}" for name, value in _fields(record).items())
        return f"{line} [{fields}]" if fields else line

    def formatException(self, exc_info: Any) -> str:
        return _indented(super().formatException(exc_info))

    def formatStack(self, stack_info: str) -> str:
        return _indented(stack_info)


class JsonFormatter(logging.Formatter):
    """Formats as one JSON object per line.

    Keys: timestamp (RFC 3339, UTC), level, process, logger, message; where they apply, request_id or request_ids,
    trace_id and exception.
    """

    def __init__(self, process: str = "") -> None:
        """`process`: name of this process; empty: show none."""
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        timestamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        event: dict[str, Any] = {
            "timestamp": timestamp.replace("+00:00", "Z"),
            "level": record.levelname,
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        elif record.stack_info:
            event["exception"] = record.stack_info
        return json.dumps(event)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the request and trace fields of a record."""
    ids = [request_id[:MAX_ID_CHARACTERS] for request_id in getattr(record, "request_ids", None) or _requests.get()()]
    ids = list(dict.fromkeys(ids))[:MAX_IDS]
    fields: dict[str, Any] = {"request_id": ids[0]} if len(ids) == 1 else {"request_ids": ids} if ids else {}
    if trace_id := _trace_id.get():
        fields["trace_id"] = trace_id
    return fields


def _quoted(value: str | list[str]) -> str:
    """Format a field value as text, quoted where it would be ambiguous."""
    values = [value] if isinstance(value, str) else value
    return ",".join(each if _PLAIN_ID.fullmatch(each) else json.dumps(each) for each in values)


def _indented(trace: str) -> str:
    return "\n".join(f"    {line}" for line in trace.translate(_CONTROLS_IN_TRACES).split("\n"))


def _log_uncaught_in_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        thread = ended.thread.name if ended.thread is not None else "unknown"
        logging.getLogger(__name__).error("thread %s failed", thread, exc_info=without_message(ended.exc_value))
