"""Converts clients' constraints to llguidance grammars, and compiles them. Needs the extra `constraints`.

Constraints are untrusted and may compile slowly: the coordinator uses this module in prompt processes only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLTokenizer, grammar_from

from specpool.protocol.grammars import GrammarError, compile_grammar, load_grammar_tokenizer

__all__ = ["ConstraintError", "compile_constraint", "load_grammar_tokenizer"]

MAX_ERROR_CHARACTERS = 300
FORMATS = (
    '{"structures": [{"begin", "schema", "end"}], "triggers": []} or '
    '{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [], "tags": []}}'
)
# Turns off llguidance options that would allow invalid answers.
STRICT = {"coerce_one_of": False, "lenient": False}
# A schema's own options take precedence.
COMPACT = {"whitespace_flexible": False}


Options = Mapping[str, bool]
"""Options of llguidance for JSON, by name."""


class ConstraintError(ValueError):
    """An invalid constraint. The message gives the reason in one short line."""


@dataclass(frozen=True)
class Tag:
    """A tagged part of the text: `begin`, JSON and `end`."""

    trigger: str
    """The start of `begin`. Free text cannot contain it."""
    begin: str
    schema: str
    """A JSON schema, with its llguidance options."""
    end: str


def compile_constraint(tokenizer: LLTokenizer, kind: str, text: str, json_whitespace: bool = False) -> str:
    """Convert a constraint to a grammar, which compiles and matches some text. Raises ConstraintError.

    `kind`: name of the field in `SamplingParams`. `text`: the field's text; for `choice`, a JSON list; for
    `json_object`, a schema. `json_whitespace`: allow optional whitespace in JSON.
    """
    try:
        grammar = _convert(tokenizer, kind, text, {} if json_whitespace else COMPACT)
        matcher = compile_grammar(tokenizer, grammar)
    except (MemoryError, KeyboardInterrupt, ConstraintError):
        raise
    except GrammarError as error:
        raise ConstraintError(f"does not compile: {_shortened(str(error))}") from None
    except BaseException as error:  # llguidance's panics do not derive from Exception
        raise ConstraintError(f"is invalid: {_shortened(str(error))}") from None
    matcher.compute_bitmask()
    if matcher.is_error():
        reason = _shortened(matcher.get_error())
        raise ConstraintError("matches no text" if "NoExtension" in reason else f"is too complex: {reason}")
    return grammar


def _convert(tokenizer: LLTokenizer, kind: str, text: str, defaults: Options) -> str:
    if kind in ("json_schema", "json_object"):
        return LLMatcher.grammar_from_json_schema(_with_options(_parsed(text), defaults))
    if kind == "structural_tag":
        return _tags_grammar(_parsed(text), tokenizer, defaults)
    if kind == "choice":
        return "start: " + " | ".join(map(_quoted, json.loads(text)))
    return grammar_from("regex" if kind == "regex" else "grammar", text)


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text)
        # Python accepts NaN and lone surrogates, which are invalid JSON.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ConstraintError("has a lone surrogate") from None
    except ValueError as error:
        raise ConstraintError(f"is not JSON: {error}") from None
    except RecursionError:
        raise ConstraintError("is nested too deeply") from None
    return value


def _with_options(schema: Any, defaults: Options) -> str:
    """Return a schema as JSON text, with its llguidance options: the defaults, its own, and `STRICT`."""
    if schema is True:
        schema = {}
    if isinstance(schema, dict) and isinstance(own := schema.get("x-guidance", {}), dict):
        schema = {**schema, "x-guidance": {**defaults, **own, **STRICT}}
    return json.dumps(schema, ensure_ascii=False)


def _tags_grammar(value: Any, tokenizer: LLTokenizer, defaults: Options) -> str:
    """Return the grammar of a structural tag in the format of vLLM and SGLang, or in xgrammar's."""
    options: Mapping[str, Any] = value if isinstance(value, dict) else {}
    if options.get("type") == "structural_tag":
        options = options["format"] if isinstance(options.get("format"), dict) else {}
        if (kind := options.get("type")) != "triggered_tags":
            raise ConstraintError(f"format {_shortened(repr(kind))} is not supported; use {FORMATS}")
    tags = options.get("structures", options.get("tags"))
    triggers = options.get("triggers")
    if not (isinstance(tags, list) and tags and isinstance(triggers, list) and all(map(_is_text, triggers))):
        raise ConstraintError(f"must be {FORMATS}")
    read = [_read_tag(tag, triggers, defaults) for tag in tags]
    return _lark(read, options.get("at_least_one") is True, options.get("stop_after_first") is True, tokenizer)


def _read_tag(tag: Any, triggers: list[str], defaults: Options) -> Tag:
    tag = tag if isinstance(tag, dict) else {}
    begin, end, content = tag.get("begin"), tag.get("end", ""), tag.get("content")
    schema = tag.get("schema", tag.get("structural_tag_schema"))
    if content is not None:
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            raise ConstraintError('the content of a tag must be {"type": "json_schema", "json_schema": ...}')
        schema = content.get("json_schema")
    if schema is None or not _is_text(begin) or not isinstance(end, str):
        raise ConstraintError('a tag must have a "begin" text and a schema, and may have an "end" text')
    trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if trigger is None:
        raise ConstraintError(f"{_shortened(json.dumps(begin))} begins with none of the triggers")
    schema = _parsed(schema) if isinstance(schema, str) else schema
    return Tag(trigger, begin, _with_options(schema, defaults), end)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _lark(tags: list[Tag], at_least_one: bool, stop_after_first: bool, tokenizer: LLTokenizer) -> str:
    """Return a Lark grammar of free text with tags.

    `at_least_one`: the text begins with a tag. `stop_after_first`: it ends after the first tag.
    """
    later, first = (" | ".join(f"{name}_{index}" for index in range(len(tags))) for name in ("tag", "first"))
    rest = "" if stop_after_first else f"({later})* text"
    start = f"({first}) {rest}" if at_least_one else rest or f"{later} | text"
    lines = ["%llguidance {}", f"start: {start}", "text: TEXT", r"TEXT: /(.|\n)*/"]
    for index, tag in enumerate(tags):
        body = f"%json {tag.schema} {_quoted(tag.end)}"
        rest_of_begin = _quoted(tag.begin.removeprefix(tag.trigger))
        token_ids = tokenizer.tokenize_str(tag.trigger, parse_special=True)
        if len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0]):
            token = f"<[{token_ids[0]}]>"  # free text has no special tokens
            lines += [f"tag_{index}: TEXT {token} {rest_of_begin} {body}"]
            lines += [f"first_{index}: {token} {rest_of_begin} {body}"]
        else:
            lines += [
                f"head_{index}[lazy]: TEXT {_quoted(tag.trigger)}",
                f"tag_{index}: head_{index} {rest_of_begin} {body}",
            ]
            lines += [f"first_{index}: {_quoted(tag.begin)} {body}"]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return a text as a Lark literal, or nothing if it is empty."""
    # JSON allows a raw DEL in a string, llguidance's lexer does not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""


def _shortened(message: str) -> str:
    """Return the line of llguidance's message with the reason, truncated."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    errors = [line for line in lines if line.startswith("error: ")]
    line = f"invalid regex: {errors[0].removeprefix('error: ')}" if errors else lines[0]
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[:MAX_ERROR_CHARACTERS]}..."
