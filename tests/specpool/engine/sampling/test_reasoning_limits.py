"""Limits on reasoning blocks depend only on the preceding tokens, not on how the sequence grew."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpool.engine.sampling.grammars import Grammars
from specpool.engine.sampling.lexers import BITS, Words
from specpool.engine.sampling.rules import SequenceRules
from specpool.protocol.sampling import Reasoning, SamplingParams
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import EOS_TOKEN_ID, byte_tokenizer

VOCAB = EOS_TOKEN_ID + 44
TOKENIZER = byte_tokenizer()
FILES = TokenizerFiles(TOKENIZER.to_str().encode(), "", {}, (EOS_TOKEN_ID,))
COLORS = 'start: "red" | "<>" | "grey goose"'


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


PROMPT = [*ids_of("<</>a<<")]
"""Contains an end tag, and ends like the beginning of another."""
TAGS = Reasoning(ids_of("<<>"), ids_of("<</>"), starts_inside=False, max_tokens=None, grammar_after=False)
NEWLINE = ids_of("\n")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(FILES, VOCAB, 2**26)


def start(grammars: Grammars, reasoning: Reasoning, grammar: str = "") -> SequenceRules:
    """Start a sequence with a compiled grammar."""
    params = SamplingParams(prompt_length=len(PROMPT), reasoning=reasoning, grammar=grammar)
    assert not grammar or not grammars.error_of(grammar)
    block = grammars.block(params)
    return SequenceRules(params, grammars.start(grammar, len(PROMPT), block) if grammar else None, block)


def allowed_by(mask: Words) -> set[int]:
    found: list[int] = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()
    return {token for token in found if token < VOCAB}


def masks_of(rules: SequenceRules, token_ids: Sequence[int], count: int = 1) -> list[set[int] | None]:
    """The allowed tokens of each row. None: all of them, or the row follows an illegal draft token."""
    changes = rules.changes(token_ids, count)
    return [None if each is None or each.allowed is None else allowed_by(each.allowed) for each in changes]


def after(rules: SequenceRules, text: str) -> set[int] | None:
    """The tokens allowed after a text that starts over."""
    rules.truncate(len(PROMPT))
    return masks_of(rules, [*PROMPT, *ids_of(text)])[0]


NOT_EOS = {*range(VOCAB)} - {EOS_TOKEN_ID}
LIMITS = st.builds(
    lambda starts_inside, maximum, grammar_after, leading: replace(
        TAGS, starts_inside=starts_inside, max_tokens=maximum, grammar_after=grammar_after, leading=leading
    ),
    st.booleans(),
    st.sampled_from([None, 0, 1, 3, 6]),
    st.booleans(),
    st.sampled_from([(), NEWLINE]),
)


@settings(max_examples=150)
@given(reasoning=LIMITS, grammar=st.booleans(), seed=st.integers(0, 10_000))
def test_masks_are_those_of_a_fresh_start(grammars: Grammars, reasoning: Reasoning, grammar: bool, seed: int) -> None:
    """Sequences grow by legal tokens, are verified with legal and illegal drafts, and are truncated."""
    pick, text = random.Random(seed), COLORS if grammar and reasoning.grammar_after else ""
    kept, tokens = start(grammars, reasoning, text), [*PROMPT]
    likely = {*ids_of("<>/\n"), EOS_TOKEN_ID}
    for _ in range(16):
        (allowed,) = masks_of(kept, tokens)
        legal = sorted(likely if allowed is None else allowed & likely or allowed)
        tokens.append(pick.choice(legal))
        if tokens[-1] == EOS_TOKEN_ID or pick.random() < 0.3:
            del tokens[pick.randrange(len(PROMPT), len(tokens)) :]
            kept.truncate(len(tokens))
        drafts = pick.choices(sorted({*legal, *likely}), k=pick.randrange(6))
        fresh, context = start(grammars, reasoning, text), [*tokens, *drafts]
        assert masks_of(kept, context, len(drafts) + 1) == masks_of(fresh, context, len(drafts) + 1)
        kept.truncate(len(tokens))
        assert kept.forced(tokens, 9) == start(grammars, reasoning, text).forced(tokens, 9)
        kept.truncate(len(tokens))


@settings(max_examples=100)
@given(
    reasoning=LIMITS,
    grammar=st.booleans(),
    draft=st.lists(st.sampled_from(["<<>", "<</>", "<", "r", "ed", "\n"]), max_size=6),
)
def test_a_fork_reads_the_masks_of_a_draft(
    grammars: Grammars, reasoning: Reasoning, grammar: bool, draft: list[str]
) -> None:
    text = COLORS if grammar and reasoning.grammar_after else ""
    rules, mask = start(grammars, reasoning, text), np.zeros(-(-VOCAB // BITS), np.uint32)
    rules.changes([*PROMPT, *ids_of("<<><</>red")], 1)
    reader, context = rules.fork(PROMPT, len(PROMPT)), [*PROMPT]
    assert reader is not None
    for token in ids_of("".join(draft)):
        context.append(token)
        reader.read_token(token, mask)
        (expected,) = masks_of(start(grammars, reasoning, text), context)
        assert allowed_by(mask) == ({*range(VOCAB)} if expected is None else expected)
    rules.truncate(len(PROMPT))
    other = [*PROMPT, *ids_of("<<>abcdefghijklmno")]
    assert masks_of(rules, other) == masks_of(start(grammars, reasoning, text), other)


def test_the_maximum_ends_the_block(grammars: Grammars) -> None:
    rules = start(grammars, replace(TAGS, max_tokens=5))
    assert after(rules, "") is None
    assert after(rules, "<<>abcd") is None
    assert after(rules, "<<>abcde") == {*ids_of("<")}
    assert after(rules, "<<>abcde<<") == {*ids_of("/")}
    assert after(rules, "<<>abc<<") == {*ids_of("/")}  # the model has begun the tag
    assert after(rules, "<<>abcde<</>") is None
    assert after(rules, "<<>ab<</>cdefgh") is None
    assert after(rules, "ab<<>cdefgh") is None  # no block, as it does not come first
    assert after(rules, "\n<<>abcde") is None


def test_one_token_of_whitespace_may_precede_the_block(grammars: Grammars) -> None:
    rules = start(grammars, replace(TAGS, max_tokens=2, leading=NEWLINE))
    assert after(rules, "\n<<>ab") == {*ids_of("<")}
    assert after(rules, "\n\n<<>ab") is None
    rules = start(grammars, replace(TAGS, leading=NEWLINE, grammar_after=True), COLORS)
    assert after(rules, "") == {*ids_of("<rg")}
    rules = start(grammars, replace(TAGS, leading=NEWLINE, grammar_after=True), r"start: /\n{0,2}red/")
    assert after(rules, "") == {*ids_of("<r\n")}
    assert after(rules, "\n") == {*ids_of("<r\n")}
    assert after(rules, "\n\n") == {*ids_of("r")}
    assert after(rules, "\n<<><</>") == {*ids_of("r\n")}


def test_a_block_in_the_prompt_can_be_closed_at_once(grammars: Grammars) -> None:
    rules = start(grammars, replace(TAGS, starts_inside=True, max_tokens=0))
    assert [after(rules, text) for text in ("", "<", "<<", "<</", "<</>")] == [
        *({*ids_of(token)} for token in "<</>"),
        None,
    ]
    assert rules.forced([*PROMPT, *ids_of("<</>")], 9) == ()


def test_a_maximum_of_zero_masks_the_begin_tag(grammars: Grammars) -> None:
    rules = start(grammars, replace(TAGS, max_tokens=0, leading=NEWLINE))
    for begin in ("", "\n"):
        assert after(rules, begin) is None
        assert after(rules, f"{begin}<") == {*range(VOCAB)} - {*ids_of("<")}
        assert after(rules, f"{begin}<x<") is None
    single = start(grammars, replace(TAGS, begin=ids_of(">"), max_tokens=0))
    assert after(single, "") == {*range(VOCAB)} - {*ids_of(">")}
    assert after(single, "x") is None
    constrained = start(grammars, replace(TAGS, max_tokens=0, grammar_after=True), COLORS)
    assert after(constrained, "") == {*ids_of("r<g")}
    assert after(constrained, "<") == {*ids_of(">")}


def test_the_grammar_begins_after_the_block(grammars: Grammars) -> None:
    rules = start(grammars, replace(TAGS, grammar_after=True), COLORS)
    assert after(rules, "") == {*ids_of("<rg")}
    assert after(rules, "<") == {*ids_of("<>")}  # the tag, or a text of the grammar
    assert after(rules, "<<") == {*ids_of(">")}
    assert after(rules, "r") == {*ids_of("e")}
    assert after(rules, "<>") == {EOS_TOKEN_ID}
    assert after(rules, "<<>red") == NOT_EOS
    assert after(rules, "<<>red<</>") == {*ids_of("r<g")}
    assert after(rules, "<<>red<</>re") == {*ids_of("d")}
    assert after(rules, "<<><</>red") == {EOS_TOKEN_ID}


def test_tags_are_forced_together_with_the_grammar(grammars: Grammars) -> None:
    rules = start(grammars, replace(TAGS, starts_inside=True, max_tokens=3, grammar_after=True), 'start: "red" /[a-z]/')
    assert rules.forced([*PROMPT, *ids_of("ab")], 20) == ()
    assert rules.forced([*PROMPT, *ids_of("ab<")], 20) == ids_of("</>red")
    rules.truncate(len(PROMPT))
    assert rules.forced([*PROMPT, *ids_of("abc")], 2) == ids_of("<<")
    assert rules.forced([*PROMPT, *ids_of("abc")], 5) == ids_of("<</>r")
    rules.truncate(len(PROMPT))
    assert rules.forced([*PROMPT, *ids_of("abc<</>")], 20) == ids_of("red")
    outside = start(grammars, replace(TAGS, grammar_after=True), 'start: "red"')
    assert outside.forced(PROMPT, 20) == ()
    assert outside.forced([*PROMPT, *ids_of("r")], 20) == ids_of("ed")


def test_rows_of_one_pass_may_enter_and_leave_the_block(grammars: Grammars) -> None:
    rules = start(grammars, replace(TAGS, grammar_after=True, max_tokens=2), COLORS)
    masks = masks_of(rules, [*PROMPT, *ids_of("<<>xy<</>red")], 13)
    assert masks == [
        {*ids_of("<rg")}, {*ids_of("<>")}, {*ids_of(">")}, NOT_EOS, NOT_EOS,
        *({*ids_of(token)} for token in "<</>"), {*ids_of("<rg")}, {*ids_of("e")}, {*ids_of("d")}, {EOS_TOKEN_ID},
    ]  # fmt: skip
    assert rules.grammar is not None
    assert (rules.grammar.num_masks, rules.grammar.failure) == (13, "")


def test_drafts_within_the_block_leave_logits(grammars: Grammars) -> None:
    def found(text: str, grammar: str = "", **params: Any) -> bool:
        rules = start(grammars, replace(TAGS, grammar_after=bool(grammar), max_tokens=1), grammar)
        rules.params = replace(rules.params, **params)
        rules.changes([*PROMPT, *ids_of("<<>a<</>")], 1)
        return rules.leaves_logits([*PROMPT, *ids_of(text)], len(PROMPT))

    assert all(found(text) for text in ("", "<<>", "<<>ab"))
    assert not found("<<>", min_tokens=1)
    assert [found(text, COLORS) for text in ("", "<<>", "<<>b<</", "<<>b<</>")] == [False, True, True, False]
    assert not found("<<>", COLORS, presence_penalty=0.1)


def test_limits_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    rules = start(Grammars(FILES, VOCAB, 2**26), replace(TAGS, max_tokens=1))
    assert after(rules, "<<>a") == {*ids_of("<")}


def test_a_grammar_from_the_first_token_has_no_block(grammars: Grammars) -> None:
    assert start(grammars, replace(TAGS, max_tokens=2), COLORS).block is None
