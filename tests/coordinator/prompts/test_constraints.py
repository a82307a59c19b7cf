"""Conversion of clients' constraints to grammars."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tiny_tokenizers import BYTES

from coordinator.prompts.constraints import MAX_ERROR_CHARACTERS, ConstraintError, compile_constraint
from specpool.protocol.grammars import compile_grammar, load_grammar_tokenizer
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

ANY = {"type": "object"}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_grammar_tokenizer(TokenizerFiles(BYTES.to_str().encode(), "", {}, (EOS_TOKEN_ID,)), VOCAB_SIZE)


def matches(
    tokenizer: LLTokenizer,
    kind: str,
    constraint: Any,
    text: str,
    special: bool = False,
    json_whitespace: bool = False,
) -> bool | None:
    """Whether a text matches, or None if it is the beginning of a match."""
    source = constraint if isinstance(constraint, str) else json.dumps(constraint)
    matcher = compile_grammar(tokenizer, compile_constraint(tokenizer, kind, source, json_whitespace))
    # Even without `parse_special`, the text "<eos>" as a whole is tokenized as the special token.
    parts = [text] if special else text
    token_ids = [token_id for part in parts for token_id in tokenizer.tokenize_str(part, parse_special=special)]
    if matcher.try_consume_tokens(token_ids) < len(token_ids):
        return False
    return True if matcher.is_accepting() else None


CASES = [
    ("json_schema", POINT, '{"x":12}', True),
    ("json_schema", POINT, '{"x":1', None),
    ("json_schema", POINT, '{"y"', False),
    ("json_schema", True, "[1,null]", True),
    ("json_object", ANY, '{"a":[1,{"b":"c d"}]}', True),
    ("json_object", ANY, "[", False),
    ("regex", r"\d{4}-\d{2}", "2026-11", True),
    ("regex", r"\d{4}-\d{2}", "2026-", None),
    ("regex", "a/b", "a/b", True),
    ("regex", "", "", True),
    ("grammar", 'start: "a" start | "b"', "aab", True),
    ("grammar", 'root ::= "a" root | "b"', "aab", True),
    ("grammar", 'root ::= "a" root | "b"', "aa", None),
    ("choice", ["a", "ab", 'say "no"\n', "\U0001f600", "a\x00b"], "ab", True),
    ("choice", ["a", "ab", 'say "no"\n', "\U0001f600", "a\x00b"], 'say "no"\n', True),
    ("choice", ["a", "ab", 'say "no"\n', "\U0001f600", "a\x00b"], "\U0001f600", True),
    ("choice", ["a", "ab", 'say "no"\n', "\U0001f600", "a\x00b"], "a\x00b", True),
    ("choice", ["a", "ab"], "b", False),
]


@pytest.mark.parametrize(("kind", "constraint", "text", "expected"), CASES)
def test_grammars_match_what_the_constraint_allows(
    tokenizer: LLTokenizer, kind: str, constraint: Any, text: str, expected: bool | None
) -> None:
    assert matches(tokenizer, kind, constraint, text) is expected


# Line separators, quotes, escapes, and the ends of the ranges of characters.
AWKWARD = "\"'\\/\r\n\t\x00\x1f\x7f\x80\x85\xa0\u2028\u2029\ufeff\ufffd\uffff\U00010000\U0010ffff#{}[]<>%$"
CHARACTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from(AWKWARD)


def test_choices_may_contain_any_character(tokenizer: LLTokenizer) -> None:
    characters = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000]
    for begin in range(0, len(characters), 2048):
        text = "".join(characters[begin : begin + 2048])
        assert matches(tokenizer, "choice", [text], text) is True


@given(st.lists(st.text(CHARACTERS, min_size=1, max_size=8), min_size=1, max_size=4))
@example(["\x7f"])
@settings(max_examples=50)
def test_choices_match_themselves_only(tokenizer: LLTokenizer, choices: list[str]) -> None:
    for choice in choices:
        assert matches(tokenizer, "choice", choices, choice) is True
    assert matches(tokenizer, "choice", choices, f"{max(choices, key=len)}x") is False


@given(st.text(CHARACTERS, max_size=8))
@example("\x7f")
@settings(max_examples=50)
def test_tags_may_contain_any_character(tokenizer: LLTokenizer, text: str) -> None:
    schema = {"const": text}
    tag = {"structures": [{"begin": f"<{text}", "schema": schema, "end": f"{text}>"}], "triggers": [f"<{text}"]}
    value = json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # as llguidance requires in answers
    answer = f"<{text}{value}{text}>"
    assert matches(tokenizer, "structural_tag", tag, answer) is True


LEGACY = {"structures": [{"begin": "<fn=a>", "schema": POINT, "end": "</fn>"}], "triggers": ["<fn="]}


def triggered(begin: str = "<fn=a>", trigger: str = "<fn=", **options: bool) -> dict[str, Any]:
    tag = {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": POINT}, "end": "</fn>"}
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": [trigger], "tags": [tag], **options},
    }


CALL = '<fn=a>{"x":1}</fn>'


@pytest.mark.parametrize("tag", [LEGACY, triggered()], ids=["vllm", "xgrammar"])
def test_structural_tags_constrain_the_tagged_parts_only(tokenizer: LLTokenizer, tag: Any) -> None:
    for text, expected in (
        ("hi", True),
        (f"hi {CALL}{CALL} bye", True),
        ("<fn=b", False),
        ('hi <fn=a>{"y', False),
        ('<fn=a>{"x":1}', None),
    ):
        assert matches(tokenizer, "structural_tag", tag, text) is expected


def test_structural_tags_can_require_a_tag_and_end_after_it(tokenizer: LLTokenizer) -> None:
    cases: list[tuple[dict[str, bool], list[bool | None]]] = [
        ({"at_least_one": True}, [False, True, True]),
        ({"stop_after_first": True}, [True, True, False]),
        ({"at_least_one": True, "stop_after_first": True}, [False, True, False]),
    ]
    for options, expected in cases:
        texts = ("hi", CALL, f"{CALL} hi")
        found = [matches(tokenizer, "structural_tag", triggered(**options), text) for text in texts]
        assert found == expected, options


def separated(separator: str = ", ", begin: str = "<fn=a>", **options: bool) -> dict[str, Any]:
    tags = [{"begin": begin, "content": {"type": "json_schema", "json_schema": POINT}, "end": "</fn>"}]
    form = {"type": "tags_with_separator", "separator": separator, "tags": tags, **options}
    return {"type": "structural_tag", "format": form}


@pytest.mark.parametrize("separator", ["", ", "])
def test_structural_tags_can_be_the_whole_text(tokenizer: LLTokenizer, separator: str) -> None:
    cases: list[tuple[dict[str, bool], list[bool | None]]] = [
        ({}, [True, True, True]),
        ({"at_least_one": True}, [None, True, True]),
        ({"stop_after_first": True}, [True, True, False]),
        ({"at_least_one": True, "stop_after_first": True}, [None, True, False]),
    ]
    for options, expected in cases:
        tag = separated(separator, **options)
        texts = ("", CALL, f"{CALL}{separator}{CALL}")
        assert [matches(tokenizer, "structural_tag", tag, text) for text in texts] == expected, options
        assert matches(tokenizer, "structural_tag", tag, f"hi {CALL}") is False
        assert matches(tokenizer, "structural_tag", tag, f"{CALL}{separator}{CALL}.") is False


def special_tokenizer(*tokens: str) -> LLTokenizer:
    library = byte_tokenizer()
    library.add_special_tokens(list(tokens))
    files = TokenizerFiles(library.to_str().encode(), "", {}, (EOS_TOKEN_ID,))
    return load_grammar_tokenizer(files, VOCAB_SIZE + len(tokens))


def test_tags_may_contain_special_tokens() -> None:
    tokenizer = special_tokenizer("<call>", "<args>")
    begin = "<call>é <args>"
    for tag in (separated(begin=begin), triggered(begin, "<call>"), triggered(begin, "<call>", at_least_one=True)):
        assert matches(tokenizer, "structural_tag", tag, '<call>é <args>{"x":1}</fn>', special=True) is True
        assert matches(tokenizer, "structural_tag", tag, '<call>é {"x', special=True) is False


def test_a_trigger_may_be_a_special_token() -> None:
    tokenizer = special_tokenizer("<call>")
    for at_least_one in (False, True):
        tag = triggered("<call>:", "<call>", at_least_one=at_least_one)
        assert matches(tokenizer, "structural_tag", tag, '<call>:{"x":1}</fn>', special=True) is True
        assert matches(tokenizer, "structural_tag", tag, "<call>x", special=True) is False


@pytest.mark.parametrize(
    ("kind", "constraint", "answer"),
    [
        ("json_schema", POINT, '{"x": 1}'),
        ("json_schema", True, "[1, 2]"),
        ("json_object", ANY, '{ "a":1}'),
        ("structural_tag", LEGACY, '<fn=a>{"x": 1}</fn>'),
        ("structural_tag", triggered(), '<fn=a>{"x":1 }</fn>'),
    ],
)
def test_json_is_compact_unless_whitespace_is_allowed(
    tokenizer: LLTokenizer, kind: str, constraint: Any, answer: str
) -> None:
    assert matches(tokenizer, kind, constraint, answer) is False
    assert matches(tokenizer, kind, constraint, answer, json_whitespace=True) is True


def test_options_of_a_schema_decide_about_whitespace(tokenizer: LLTokenizer) -> None:
    for options in ({"whitespace_flexible": True}, {"whitespace_pattern": " ?"}, {"key_separator": ": "}):
        assert matches(tokenizer, "json_schema", {**POINT, "x-guidance": options}, '{"x": 1}') is True
    compact = {**POINT, "x-guidance": {"whitespace_flexible": False}}
    assert matches(tokenizer, "json_schema", compact, '{"x": 1}', json_whitespace=True) is False


REFUSED = [
    ("json_schema", "{", "is not JSON: Expecting property name"),
    ("json_schema", '{"enum": ["\\ud800"]}', "has a lone surrogate"),
    ("json_schema", "[" * 60_000, "is nested too deeply"),
    ("json_schema", "5", "does not compile: schema must be an object or boolean"),
    ("json_schema", '{"x-guidance": [",", ":", true, null, true, true]}', '"x-guidance" must be an object'),
    ("json_schema", '{"type": "foo"}', "does not compile: Invalid type: foo"),
    ("json_schema", '{"not": {"const": 1}}', 'does not compile: Unimplemented keys: ["not"]'),
    ("regex", "(a", "does not compile: invalid regex: unclosed group"),
    ("regex", r"[^\s\S]", "matches no text"),
    ("grammar", 'start: "a" | foo', 'does not compile: at 1(8): unknown name: "foo"'),
    (
        "grammar",
        'root ::= "a" | foo',
        "is invalid: Failed to convert the grammar from GBNF to Lark: Rule 'foo' not found",
    ),
    ("grammar", "start: start", "matches no text"),
    ("structural_tag", "[]", "must be {"),
    (
        "structural_tag",
        '{"type": "structural_tag", "format": {"type": "any_text"}}',
        "format 'any_text' is not supported",
    ),
    ("structural_tag", '{"structures": [{}], "triggers": ["a"]}', "a tag must have"),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "tags_with_separator"}}', "must be {"),
    ("structural_tag", json.dumps(separated(5)), "the separator must be a string"),  # type: ignore[arg-type]
    ("structural_tag", json.dumps({**LEGACY, "triggers": ["x"]}), '"<fn=a>" begins with none of the triggers'),
    (
        "structural_tag",
        json.dumps(triggered()).replace("json_schema", "regex"),
        'the content of a tag must be {"type": "json_schema"',
    ),
]


@pytest.mark.parametrize(("kind", "text", "reason"), REFUSED)
def test_refusals_say_what_is_wrong_in_one_short_line(
    tokenizer: LLTokenizer, kind: str, text: str, reason: str
) -> None:
    with pytest.raises(ConstraintError) as refused:
        compile_constraint(tokenizer, kind, text)
    assert str(refused.value).startswith(reason)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) <= MAX_ERROR_CHARACTERS + 100


@pytest.mark.parametrize("option", ["coerce_one_of", "lenient"])
def test_answers_must_validate_whatever_options_the_schema_sets(tokenizer: LLTokenizer, option: str) -> None:
    schema = {"x-guidance": {option: True}, "oneOf": [{"type": "number"}, {"type": "integer"}], "not": {}}
    tag = {**LEGACY, "structures": [{"begin": "<fn=a>", "schema": schema, "end": ""}]}
    for kind, constraint in (("json_schema", schema), ("structural_tag", tag)):
        with pytest.raises(ConstraintError, match=r"does not compile: .*(oneOf|Unimplemented)"):
            compile_constraint(tokenizer, kind, json.dumps(constraint))
