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
    '{"structures": [{"begin", "schema", "end"}], "triggers": []} or {"type": "structural_tag", "format": '
    '{"type": "triggered_tags", "triggers": [], "tags": []} or '
    '{"type": "tags_with_separator", "separator": "", "tags": []}}'
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

    begin: str
    schema: str
    """JSON schema, including llguidance options."""
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
    """Return a schema as JSON with llguidance options: the defaults, its own, then `STRICT`."""
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        own = schema.get("x-guidance", {})
        if not isinstance(own, dict):  # llguidance would read a list as options, too
            raise ConstraintError('"x-guidance" must be an object')
        schema = {**schema, "x-guidance": {**defaults, **own, **STRICT}}
    return json.dumps(schema, ensure_ascii=False)


def _tags_grammar(value: Any, tokenizer: LLTokenizer, defaults: Options) -> str:
    """Return the grammar of a structural tag in the format of vLLM and SGLang, or in xgrammar's."""
    options: Mapping[str, Any] = value if isinstance(value, dict) else {}
    kind = "triggered_tags"
    if options.get("type") == "structural_tag":
        options = options["format"] if isinstance(options.get("format"), dict) else {}
        kind = options.get("type", "")
    if kind not in ("triggered_tags", "tags_with_separator"):
        raise ConstraintError(f"format {_shortened(repr(kind))} is not supported; use {FORMATS}")
    tags = options.get("structures", options.get("tags"))
    if not (isinstance(tags, list) and tags):
        raise ConstraintError(f"must be {FORMATS}")
    convert = _triggered_tags if kind == "triggered_tags" else _separated_tags
    return "\n".join(["%llguidance {}", *convert([_read_tag(tag, defaults) for tag in tags], options, tokenizer)])


def _read_tag(tag: Any, defaults: Options) -> Tag:
    tag = tag if isinstance(tag, dict) else {}
    begin, end, content = tag.get("begin"), tag.get("end", ""), tag.get("content")
    schema = tag.get("schema", tag.get("structural_tag_schema"))
    if content is not None:
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            raise ConstraintError('the content of a tag must be {"type": "json_schema", "json_schema": ...}')
        schema = content.get("json_schema")
    if schema is None or not _is_text(begin) or not isinstance(end, str):
        raise ConstraintError('a tag must have a "begin" text and a schema, and may have an "end" text')
    schema = _parsed(schema) if isinstance(schema, str) else schema
    return Tag(begin, _with_options(schema, defaults), end)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _triggered_tags(tags: list[Tag], options: Mapping[str, Any], tokenizer: LLTokenizer) -> list[str]:
    """Return the grammar rules of free text with tags. Each tag begins with a trigger, which the text cannot contain.

    `at_least_one`: the text begins with a tag. `stop_after_first`: it ends after the first tag.
    """
    triggers = options.get("triggers")
    if not (isinstance(triggers, list) and all(map(_is_text, triggers))):
        raise ConstraintError(f"must be {FORMATS}")
    later, first = (_alternatives(name, tags) for name in ("tag", "first"))
    rest = "" if options.get("stop_after_first") is True else f"({later})* text"
    start = f"({first}) {rest}" if options.get("at_least_one") is True else rest or f"{later} | text"
    lines = [f"start: {start}", "text: TEXT", r"TEXT: /(.|\n)*/"]
    for index, tag in enumerate(tags):
        trigger = _trigger_of(tag, triggers)
        body = f"{_terms(tag.begin.removeprefix(trigger), tokenizer)} {_body(tag, tokenizer)}"
        terms = _terms(trigger, tokenizer)
        lines.append(f"first_{index}: {terms} {body}")
        if terms.startswith("<"):  # free text has no special tokens
            lines.append(f"tag_{index}: TEXT {terms} {body}")
        else:
            lines += [f"head_{index}[lazy]: TEXT {terms}", f"tag_{index}: head_{index} {body}"]
    return lines


def _separated_tags(tags: list[Tag], options: Mapping[str, Any], tokenizer: LLTokenizer) -> list[str]:
    """Return the grammar rules of a list of tags without other text.

    `at_least_one`: the list is not empty. `stop_after_first`: it has at most one tag.
    """
    separator = options.get("separator", "")
    if not isinstance(separator, str):
        raise ConstraintError("the separator must be a string")
    later = "" if options.get("stop_after_first") is True else f"({_terms(separator, tokenizer)} tag)*"
    start = f"tag {later}" if options.get("at_least_one") is True else f"(tag {later})?"
    rules = (f"tag_{i}: {_terms(tag.begin, tokenizer)} {_body(tag, tokenizer)}" for i, tag in enumerate(tags))
    return [f"start: {start}", f"tag: {_alternatives('tag', tags)}", *rules]


def _alternatives(name: str, tags: list[Tag]) -> str:
    return " | ".join(f"{name}_{index}" for index in range(len(tags)))


def _trigger_of(tag: Tag, triggers: list[str]) -> str:
    trigger = next((trigger for trigger in triggers if tag.begin.startswith(trigger)), None)
    if trigger is None:
        raise ConstraintError(f"{_shortened(json.dumps(tag.begin))} begins with none of the triggers")
    return trigger


def _body(tag: Tag, tokenizer: LLTokenizer) -> str:
    return f"%json {tag.schema} {_terms(tag.end, tokenizer)}"


def _terms(text: str, tokenizer: LLTokenizer) -> str:
    """Convert a string to Lark terms: special tokens, and literals between them."""
    terms = []
    for token_id in tokenizer.tokenize_str(text, parse_special=True):
        if tokenizer.is_special_token(token_id) and (token := tokenizer.decode_str([token_id])) in text:
            before, _, text = text.partition(token)
            terms += [_quoted(before), f"<[{token_id}]>"]
    return " ".join(filter(None, [*terms, _quoted(text)]))


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
