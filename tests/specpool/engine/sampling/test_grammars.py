"""Masks depend only on the tokens before them, however a sequence grew, and samplers choose allowed tokens only."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from specpool.engine.sampling.batch import Sampler
from specpool.engine.sampling.compiled import BLOCK
from specpool.engine.sampling.grammars import BITS, Grammars, SequenceGrammar, Words
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import SequenceRules
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import EOS_TOKEN_ID, byte_tokenizer

VOCAB = EOS_TOKEN_ID + 44
"""Models have more tokens than their tokenizers."""
PROMPT = [1, 2, EOS_TOKEN_ID]
COLORS = 'start: "red" | "green" | "grey goose"'
LIST = 'start: "[" (ITEM ("," ITEM)*)? "]"\nITEM: /[0-9]{1,3}|"[^"]{0,5}"/'
TOKENIZER = byte_tokenizer()
FILES = TokenizerFiles(TOKENIZER.to_str().encode(), "", {}, (EOS_TOKEN_ID,))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(FILES, VOCAB)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def allowed_by(mask: Words | None) -> set[int]:
    assert mask is not None
    return {*np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()}


def fresh_masks(grammars: Grammars, grammar: str, token_ids: Sequence[int], count: int) -> list[set[int] | None]:
    masks = grammars.start(grammar, len(PROMPT)).masks(token_ids, count)
    return [None if mask is None else allowed_by(mask) for mask in masks]


@settings(max_examples=60, deadline=None)
@given(grammar=st.sampled_from([COLORS, LIST]), seed=st.integers(0, 10_000))
def test_masks_are_those_of_a_grammar_that_reads_all_at_once(grammars: Grammars, grammar: str, seed: int) -> None:
    """Sequences grow by legal tokens, are verified with legal and illegal drafts, and are truncated."""
    pick, kept, tokens = random.Random(seed), grammars.start(grammar, len(PROMPT)), [*PROMPT]
    for _ in range(12):
        (mask,) = kept.masks(tokens, 1)
        legal = sorted(allowed_by(mask))
        tokens.append(pick.choice(legal))
        if tokens[-1] == EOS_TOKEN_ID or pick.random() < 0.3:
            del tokens[pick.randrange(len(PROMPT), len(tokens)) :]
        kept.truncate(len(tokens))
        drafts = [pick.choice([*legal, pick.randrange(EOS_TOKEN_ID)]) for _ in range(pick.randrange(4))]
        if pick.random() < 0.5:
            kept.compute([*tokens, *drafts], len(drafts) + 1)
        masks = kept.masks([*tokens, *drafts], len(drafts) + 1)
        expected = fresh_masks(grammars, grammar, [*tokens, *drafts], len(drafts) + 1)
        assert [None if mask is None else allowed_by(mask) for mask in masks] == expected
        assert not kept.error_in(len(drafts) + 1)
        kept.truncate(len(tokens))


def test_the_end_is_allowed_where_the_text_may_end(grammars: Grammars) -> None:
    sequence, tokens = grammars.start(COLORS, len(PROMPT)), [*PROMPT, *ids_of("red"), EOS_TOKEN_ID]
    masks = [allowed_by(mask) for mask in sequence.masks(tokens, 5)]
    assert masks == [{*ids_of("rg")}, {*ids_of("e")}, {*ids_of("d")}, {EOS_TOKEN_ID}, {EOS_TOKEN_ID}]
    sequence.truncate(len(tokens) - 1)
    assert [allowed_by(mask) for mask in sequence.masks(tokens[:-1], 1)] == [{EOS_TOKEN_ID}]
    assert fresh_masks(grammars, COLORS, tokens, 1) == [{EOS_TOKEN_ID}]
    for text in ([*ids_of("re"), EOS_TOKEN_ID], [*ids_of("red"), EOS_TOKEN_ID, 0]):
        assert fresh_masks(grammars, COLORS, [*PROMPT, *text], 1) == [None]


def test_all_tokens_that_end_a_text_are_allowed_together() -> None:
    several = Grammars(TokenizerFiles(FILES.tokenizer_json, "", {}, (EOS_TOKEN_ID, 0)), VOCAB)
    (mask,) = several.start(COLORS, 0).masks(ids_of("red"), 1)
    assert allowed_by(mask) == {EOS_TOKEN_ID, 0}


def test_rows_after_an_illegal_draft_token_have_no_mask(grammars: Grammars) -> None:
    masks = grammars.start(COLORS, len(PROMPT)).masks([*PROMPT, *ids_of("gxe")], 4)
    assert [mask is None for mask in masks] == [False, False, True, True]


def test_a_committed_text_outside_the_grammar_is_an_error(grammars: Grammars) -> None:
    sequence = grammars.start(COLORS, len(PROMPT))
    assert sequence.masks([*PROMPT, *ids_of("x")], 1) == [None]
    assert "does not match" in sequence.error_in(1)
    assert sequence.error_in(0) == ""


def test_forced_tokens_are_the_only_continuation(grammars: Grammars) -> None:
    sequence, tokens = grammars.start(COLORS, len(PROMPT)), [*PROMPT, *ids_of("grey")]
    assert sequence.forced(tokens, 10) == (*ids_of(" goose"),)
    assert sequence.forced(tokens, 2) == (*ids_of(" g"),)
    assert sequence.forced(tokens, 0) == ()
    sequence.truncate(len(tokens) - 1)
    assert sequence.forced(tokens[:-1], 10) == ()  # green, or grey goose
    assert sequence.forced([*tokens[:-1], *ids_of("x")], 10) == ()


def test_a_fork_reads_on_by_itself(grammars: Grammars) -> None:
    sequence = grammars.start(COLORS, len(PROMPT))
    sequence.masks([*PROMPT, *ids_of("g")], 1)
    forks = [sequence.fork([*PROMPT, *ids_of(text)]) for text in ("gre", "gre")]
    mask = np.zeros(-(-VOCAB // BITS), np.uint32)
    forks[0].read_token(*ids_of("y"), mask)
    assert allowed_by(mask) == {*ids_of(" ")}
    forks[1].read_token(*ids_of("e"), mask)
    assert allowed_by(mask) == {*ids_of("n")}
    assert [allowed_by(each) for each in sequence.masks([*PROMPT, *ids_of("gr")], 1)] == [{*ids_of("e")}]


def test_a_grammar_that_does_not_compile_says_why(grammars: Grammars) -> None:
    assert grammars.wait("start: foo", 60)
    assert "foo" in grammars.error_of("start: foo")
    assert grammars.error_of(COLORS) == ""


def test_slow_compilation_makes_nobody_wait(grammars: Grammars) -> None:
    slow = "start: " + " | ".join(f'"{number}" /[a-z]{{1,9}}{number}x/' for number in range(800))
    assert not grammars.wait(slow, 0.0)
    assert grammars.wait(slow, 60)


AMBIGUOUS = 'start: "y" | "x" s\ns: s s s | s s | T\nT: /[a-z ]/'
"""Harmless after "y", and beyond the limits after "x"."""


def test_a_failure_after_a_draft_token_concerns_only_that_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.protocol.grammars.LIMITS", LLParserLimits(step_max_items=120, verbose_errors=False))
    sequence = Grammars(FILES, VOCAB).start(AMBIGUOUS, len(PROMPT))
    draft = [*PROMPT, *ids_of("x" + 30 * "a")]
    masks = sequence.masks(draft, 32)
    failed = [mask is None for mask in masks].index(True)
    assert 0 < failed < 31
    assert sequence.error_in(failed) == ""
    assert "items" in sequence.error_in(failed + 1)
    sequence.truncate(len(PROMPT))
    assert [allowed_by(mask) for mask in sequence.masks([*PROMPT, *ids_of("y")], 2)] == [
        {*ids_of("xy")},
        {EOS_TOKEN_ID},
    ]
    assert sequence.error_in(2) == ""


def test_a_grammar_cannot_end_the_text_in_its_middle(grammars: Grammars) -> None:
    sequence = grammars.start('start: "a" (<eos> "b" | "c")', 0)
    (mask,) = sequence.masks(ids_of("a"), 1)
    assert allowed_by(mask) == {*ids_of("c")}
    only_end = grammars.start('start: "a" <eos> "b"', 0)
    assert only_end.forced(ids_of("a"), 9) == ()
    assert only_end.masks(ids_of("a"), 1) == [None]
    assert "no token" in only_end.error_in(1)


def test_grammars_being_compiled_are_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.engine.sampling.grammars.MAX_GRAMMARS", 3)
    own = Grammars(FILES, VOCAB)
    slow = ["start: " + " | ".join(f'"{n}" /[a-z]{{1,9}}{i}x{n}/' for n in range(300)) for i in range(5)]
    for _ in range(3):
        assert not any(own.wait(each, 0.0) for each in slow[3:])
        own.wait(slow[0], 0.0)
    assert len(own._compiled) == 3
    assert all(own.wait(each, 60) for each in [*own._compiled])
    assert all(own.wait(each, 60) for each in slow)


def test_grammars_are_forgotten_in_the_order_of_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.engine.sampling.grammars.MAX_GRAMMARS", 5)
    own = Grammars(FILES, VOCAB)
    for number in range(9):
        assert own.wait(f'start: "{number}"', 60)
        assert own.wait(COLORS, 60)
    assert [*own._compiled] == [*(f'start: "{number}"' for number in range(5, 9)), COLORS]


def test_without_the_library_a_grammar_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.environment.extras._is_installed", lambda module: module != "llguidance")
    without = Grammars(FILES, VOCAB)
    assert without.wait(COLORS, 0)
    assert "llguidance" in without.error_of(COLORS)


def test_the_minimum_length_yields_where_only_the_end_is_allowed(grammars: Grammars) -> None:
    params = SamplingParams(min_tokens=9, stop_token_ids=(EOS_TOKEN_ID, *ids_of("e")), grammar=COLORS)
    rules = SequenceRules(params, grammars.start(COLORS, 0))
    chosen = []
    for text in ("", "gre", "red"):
        rules.truncate(0)
        (changes,) = rules.changes(ids_of(text), 1)
        assert changes is not None
        chosen.append([*changes.masked_ids])
    assert chosen[:2] == [[*params.stop_token_ids]] * 2
    assert chosen[2] == []


class RandomMasks(SequenceGrammar):
    """Allows random tokens, the same ones in every object with this seed."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._size, self._seed = -(-vocab_size // BITS), seed

    def truncate(self, length: int) -> None:
        pass

    def masks(self, token_ids: Sequence[int], count: int) -> list[Words | None]:
        numbers = np.random.default_rng(self._seed)
        return [
            numbers.integers(0, 2**32, self._size, np.uint32) & numbers.integers(0, 2**32, self._size, np.uint32)
            for _ in range(count)
        ]


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([40, BLOCK - 1, BLOCK, 3 * BLOCK + 7]),
    cut=st.booleans(),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8]),
        top_k=st.sampled_from([0, 5]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.05]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        grammar=st.just("any"),
    ),
    seed=st.integers(0, 1000),
)
def test_both_samplers_choose_the_same_allowed_tokens(size: int, cut: bool, params: SamplingParams, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    head = Head(size, torch.randperm(size, generator=generator)[: size // 2].sort().values if cut else None)
    outputs, count = size // 2 if cut else size, 3
    logits = torch.randn(2 * count, outputs, generator=generator) * 3

    def rows() -> list[SequenceRows]:
        tokens = torch.randint(size, (2, 8), generator=torch.Generator().manual_seed(seed)).tolist()
        return [
            SequenceRows(SequenceRules(params, RandomMasks(size, seed + number)), own, count, num_logprobs=2)
            for number, own in enumerate(tokens)
        ]

    compiled, plain = (Sampler(head, torch.device("cpu"), native)(logits, rows()) for native in (True, False))
    assert compiled == plain
    for chosen, sequence in zip(compiled, rows(), strict=True):
        for token, changes in zip(chosen.token_ids, sequence.changes(), strict=False):
            assert changes is not None
            allowed = allowed_by(changes.allowed).intersection(head.token_ids(torch.arange(outputs)).tolist())
            assert token in allowed or not allowed
