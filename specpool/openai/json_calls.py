"""Parse calls written as JSON objects with a name and arguments."""

import json
import re

from specpool.openai.deltas import Content, Delta
from specpool.openai.text_reader import Steps, TextReader, collected
from specpool.openai.tool_calls import Calls

MARKS = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
SCALAR_END = re.compile(r"[,}\]\s]")


def read_json_call(text: TextReader, calls: Calls, *keys: str) -> Steps[Delta, bool]:
    """Read a call such as {"name": "f", "arguments": {}}, whose arguments have one of `keys`.

    Arguments after the name are read as they arrive. Returns False, before anything is yielded, if the text is not a
    call.
    """
    name = arguments = None
    separator = yield from text.skip("{")
    while separator in ("{", ","):
        key = yield from _read_key(text)
        if key in keys and name is not None and (yield from text.skip("{")):
            yield calls.start(name)
            yield from read_arguments(text, calls)
            yield from _skip_members(text)
            return True
        value = "" if key is None else (yield from _read_value(text))
        if key in keys:
            arguments = value
        elif key == "name":
            name = _function_of(value, calls)
        yield from text.skip_all()
        separator = (yield from text.skip(",", "}")) if value else None
    if separator is None or name is None or arguments is None or not arguments.startswith("{"):
        return False
    yield calls.start(name)
    yield calls.arguments(arguments)
    return True


def read_arguments(text: TextReader, calls: Calls) -> Steps[Delta, None]:
    """Read a call's JSON object as it arrives. Its first brace has been skipped."""
    yield calls.arguments("{")
    yield from text.scan(calls.arguments, JsonEnd(depth=1))


class JsonEnd:
    """Finds the end of a JSON object, array or string, piece by piece."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: number of brackets that are open at the beginning."""
        self._depth = depth
        self._in_string = False
        self._in_escape = False

    def __call__(self, text: str, position: int) -> int | None:
        """Return the end of the value in `text`, or None if it continues."""
        if self._in_escape and position < len(text):
            position, self._in_escape = position + 1, False
        for mark in MARKS.finditer(text, position):
            if mark[0][0] == "\\":
                self._in_escape = len(mark[0]) == 1
                continue
            if mark[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark[0] in "{[" else -1
            if self._depth <= 0 and not self._in_string:
                return mark.end()
        return None


def _read_key(text: TextReader) -> Steps[Delta, str | None]:
    """Read an object's next key and the colon. Returns None if there is none."""
    yield from text.skip_all()
    if not (yield from text.skip('"')):
        return None
    key, _ = yield from text.collect_until('"')
    yield from text.skip_all()
    colon = yield from text.skip(":")
    yield from text.skip_all()
    return key if colon else None


def _read_value(text: TextReader) -> Steps[Delta, str]:
    """Read a JSON value. Returns an empty text if there is none, or if the text ends within it."""
    begin = yield from text.peek()
    find_end = JsonEnd() if begin and begin in '{["' else _find_scalar_end
    value, is_complete = yield from collected(text.scan(str, find_end))
    return value if is_complete else ""


def _find_scalar_end(text: str, position: int) -> int | None:
    match = SCALAR_END.search(text, position)
    return match.start() if match else None


def _skip_members(text: TextReader) -> Steps[Delta, None]:
    """Skip the rest of a call's object. Malformed text is content."""
    text.mark()
    separator: str | None = ","
    while separator == ",":
        yield from text.skip_all()
        separator = yield from text.skip(",", "}")
        if separator == "," and ((yield from _read_key(text)) is None or not (yield from _read_value(text))):
            separator = None
    if separator is None and (rest := text.since_mark()).strip():
        yield Content(rest)


def _function_of(value: str, calls: Calls) -> str | None:
    """Return the name of a function that can be called, or None."""
    try:
        name = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return name if isinstance(name, str) and name in calls.schemas else None
