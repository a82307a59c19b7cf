"""Masks depend only on the tokens before them, however a sequence grew, and samplers choose allowed tokens only."""

import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpool.engine.sampling.batch import Sampler
from specpool.engine.sampling.compiled import BLOCK
from specpool.engine.sampling.grammars import GrammarLimits, Grammars, settle
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.lexers import BITS, Lexer, Words
from specpool.engine.sampling.masks import SequenceGrammar
from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import SequenceRules
from specpool.protocol.grammars import MAX_LEXER_STATES, STEP_MAX_ITEMS
from specpool.protocol.responses import MAX_ERROR_CHARACTERS
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import EOS_TOKEN_ID, byte_tokenizer

MEMORY = 2**26
VOCAB = EOS_TOKEN_ID + 44
"""Models have more tokens than their tokenizers."""
PROMPT = [1, 2, EOS_TOKEN_ID]
COLORS = 'start: "red" | "green" | "grey goose"'
LIST = 'start: "[" (ITEM ("," ITEM)*)? "]"\nITEM: /[0-9]{1,3}|"[^"]{0,5}"/'
TOKENIZER = byte_tokenizer()
FILES = TokenizerFiles(TOKENIZER.to_str().encode(), "", {}, (EOS_TOKEN_ID,))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(FILES, VOCAB, MEMORY)


def start(grammars: Grammars, grammar: str, prompt_length: int = 0) -> SequenceGrammar:
    """Start a sequence with a compiled grammar."""
    assert not grammars.error_of(grammar)
    return grammars.start(grammar, prompt_length)


def masks_of(grammars: Grammars, sequence: SequenceGrammar, token_ids: Sequence[int], count: int) -> list[Words | None]:
    """Return the masks of a round, however long they take."""
    settle(grammars.compute([(sequence, token_ids, count)]), 60.0)
    return sequence.masks(token_ids, count)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def allowed_by(mask: Words | None) -> set[int]:
    assert mask is not None
    return {*np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()}


def fresh_masks(grammars: Grammars, grammar: str, token_ids: Sequence[int], count: int) -> list[set[int] | None]:
    masks = start(grammars, grammar, len(PROMPT)).masks(token_ids, count)
    return [None if mask is None else allowed_by(mask) for mask in masks]


@settings(max_examples=60)
@given(grammar=st.sampled_from([COLORS, LIST]), seed=st.integers(0, 10_000))
def test_masks_are_those_of_a_grammar_that_reads_all_at_once(grammars: Grammars, grammar: str, seed: int) -> None:
    """Sequences grow by legal tokens, are verified with legal and illegal drafts, and are truncated."""
    pick, kept, tokens = random.Random(seed), start(grammars, grammar, len(PROMPT)), [*PROMPT]
    for _ in range(12):
        (mask,) = kept.masks(tokens, 1)
        legal = sorted(allowed_by(mask))
        tokens.append(pick.choice(legal))
        if tokens[-1] == EOS_TOKEN_ID or pick.random() < 0.3:
            del tokens[pick.randrange(len(PROMPT), len(tokens)) :]
        drafts = [pick.choice([*legal, pick.randrange(EOS_TOKEN_ID)]) for _ in range(pick.randrange(4))]
        if pick.random() < 0.5:
            settle(grammars.compute([(kept, [*tokens, *drafts], len(drafts) + 1)]), 60.0)
        masks = kept.masks([*tokens, *drafts], len(drafts) + 1)
        expected = fresh_masks(grammars, grammar, [*tokens, *drafts], len(drafts) + 1)
        assert [None if mask is None else allowed_by(mask) for mask in masks] == expected
        assert not kept.failure


def test_the_end_is_allowed_where_the_text_may_end(grammars: Grammars) -> None:
    sequence, tokens = start(grammars, COLORS, len(PROMPT)), [*PROMPT, *ids_of("red"), EOS_TOKEN_ID]
    masks = [allowed_by(mask) for mask in sequence.masks(tokens, 5)]
    assert masks == [{*ids_of("rg")}, {*ids_of("e")}, {*ids_of("d")}, {EOS_TOKEN_ID}, {EOS_TOKEN_ID}]
    assert [allowed_by(mask) for mask in sequence.masks(tokens[:-1], 1)] == [{EOS_TOKEN_ID}]
    assert fresh_masks(grammars, COLORS, tokens, 1) == [{EOS_TOKEN_ID}]
    for text in ([*ids_of("re"), EOS_TOKEN_ID], [*ids_of("red"), EOS_TOKEN_ID, 0]):
        assert fresh_masks(grammars, COLORS, [*PROMPT, *text], 1) == [None]


def test_all_tokens_that_end_a_text_are_allowed_together() -> None:
    several = Grammars(TokenizerFiles(FILES.tokenizer_json, "", {}, (EOS_TOKEN_ID, 0)), VOCAB, MEMORY)
    (mask,) = start(several, COLORS).masks(ids_of("red"), 1)
    assert allowed_by(mask) == {EOS_TOKEN_ID, 0}


def test_rows_after_an_illegal_draft_token_have_no_mask(grammars: Grammars) -> None:
    masks = start(grammars, COLORS, len(PROMPT)).masks([*PROMPT, *ids_of("gxe")], 4)
    assert [mask is None for mask in masks] == [False, False, True, True]


def test_a_committed_text_outside_the_grammar_is_an_error(grammars: Grammars) -> None:
    sequence = start(grammars, COLORS, len(PROMPT))
    assert masks_of(grammars, sequence, [*PROMPT, *ids_of("x")], 1) == [None]
    assert "does not match" in sequence.failure


def test_forced_tokens_are_the_only_continuation(grammars: Grammars) -> None:
    sequence, tokens = start(grammars, COLORS, len(PROMPT)), [*PROMPT, *ids_of("grey")]
    assert sequence.forced(tokens, 10) == (*ids_of(" goose"),)
    assert sequence.forced(tokens, 2) == (*ids_of(" g"),)
    assert sequence.forced(tokens, 0) == ()
    assert sequence.forced(tokens[:-1], 10) == ()  # green, or grey goose
    assert sequence.forced([*tokens[:-1], *ids_of("x")], 10) == ()


def test_a_fork_reads_on_by_itself(grammars: Grammars) -> None:
    sequence = start(grammars, COLORS, len(PROMPT))
    sequence.masks([*PROMPT, *ids_of("g")], 1)
    forks, mask = [sequence.fork() for _ in range(2)], np.zeros(-(-VOCAB // BITS), np.uint32)
    for fork, token, following in zip(forks, "ye", " n", strict=True):
        assert fork is not None
        assert fork.read(ids_of("gre"))
        fork.read_token(*ids_of(token), mask)
        assert allowed_by(mask) == {*ids_of(following)}
    assert [allowed_by(each) for each in sequence.masks([*PROMPT, *ids_of("gr")], 1)] == [{*ids_of("e")}]


def test_a_grammar_that_does_not_compile_says_why(grammars: Grammars) -> None:
    assert grammars.wait("start: foo", 60)
    assert "foo" in grammars.error_of("start: foo")
    assert grammars.error_of(COLORS) == ""
    assert len(grammars.error_of("start: " + "foo" * 9999)) <= MAX_ERROR_CHARACTERS


AMBIGUOUS = 'start: "y" | "x" s\ns: s s s | s s | T\nT: /[a-z ]/'
"""Harmless after "y", and beyond the limits after "x"."""


def test_the_limits_are_those_of_the_coordinator() -> None:
    assert (GrammarLimits.max_states, GrammarLimits.max_items) == (MAX_LEXER_STATES, STEP_MAX_ITEMS)


def test_a_failure_after_a_draft_token_concerns_only_that_draft() -> None:
    grammars = Grammars(FILES, VOCAB, MEMORY, GrammarLimits(max_items=120))
    sequence = start(grammars, AMBIGUOUS, len(PROMPT))
    draft = [*PROMPT, *ids_of("x" + 30 * "a")]
    masks = masks_of(grammars, sequence, draft, 32)
    failed = [mask is None for mask in masks].index(True)
    assert 0 < failed < 31
    assert (sequence.num_masks, sequence.failure) == (failed, "")
    assert masks_of(grammars, sequence, draft[: len(PROMPT) + failed], 1) == [None]
    assert "items" in sequence.failure
    assert [allowed_by(mask) for mask in masks_of(grammars, sequence, [*PROMPT, *ids_of("y")], 2)] == [
        {*ids_of("xy")},
        {EOS_TOKEN_ID},
    ]
    assert sequence.failure == ""


MANY_STATES = "start: /(.|\\n)*[aeiou](.|\\n){12}z1/"
"""The lexer has one state for every pattern of vowels in the last letters."""


class Client:
    """Generates random legal texts with drafts, as a target worker verifies them."""

    def __init__(self, grammars: Grammars, grammar: str, seed: int, length: int) -> None:
        self._grammars, self._sequence = grammars, start(grammars, grammar, len(PROMPT))
        self._pick, self._length = random.Random(seed), length
        self.token_ids, self.failure = [*PROMPT], ""

    @property
    def is_done(self) -> bool:
        return bool(self.failure) or len(self.token_ids) >= self._length

    def choice(self, mask: Words, length: int) -> int:
        """Return the allowed token that the "model" chooses at this length."""
        letters = sorted(allowed_by(mask) & {*ids_of("aeioxy")})
        return random.Random(f"{self._length} {length} {self.token_ids[len(PROMPT) :]}").choice(letters)

    def step(self, k: int) -> None:
        """Verify k draft tokens, some of them right."""
        drafts = self._pick.choices(ids_of("aeioxz1"), k=k)
        masks = masks_of(self._grammars, self._sequence, [*self.token_ids, *drafts], k + 1)
        self.failure = self._sequence.failure
        for mask, draft in zip(masks, [*drafts, None], strict=True):
            if mask is None or self.is_done:
                break
            self.token_ids.append(self.choice(mask, len(self.token_ids)))
            if self.token_ids[-1] != draft:
                break


FEW_STATES = GrammarLimits(small_states=40, max_states=70)


@settings(max_examples=6)
@given(rounds=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8)), max_size=60), memory=st.booleans())
def test_the_outcome_is_that_of_a_fresh_worker(rounds: list[tuple[int, int]], memory: bool) -> None:
    """Drafts, history, other clients of the grammar and the memory limit do not matter.

    Plain decoding on a fresh worker fails only when the text itself needs too many lexer states.
    """
    shared = Grammars(FILES, VOCAB, MEMORY if memory else 1, FEW_STATES)
    clients = [Client(shared, MANY_STATES, seed, 60 + 20 * seed) for seed in range(3)]
    for number, k in [*rounds, *((number, 4) for number in range(3) for _ in range(120))]:
        if not clients[number].is_done:
            clients[number].step(k)
    for seed, client in enumerate(clients):
        fresh = Client(Grammars(FILES, VOCAB, MEMORY, FEW_STATES), MANY_STATES, seed, 60 + 20 * seed)
        while not fresh.is_done:
            fresh.step(0)
        assert (client.token_ids, client.failure) == (fresh.token_ids, fresh.failure)


def test_slow_masks_do_not_delay_other_sequences() -> None:
    """A sequence with a large lexer continues once its mask is available."""
    may_go_on = threading.Event()

    class Patient(Grammars):
        def compile(self, grammar: str, is_large: bool) -> Lexer:
            assert not is_large or may_go_on.wait(60)
            return super().compile(grammar, is_large)

    grammars = Patient(FILES, VOCAB, MEMORY, GrammarLimits(small_states=12))
    slow, quick = start(grammars, MANY_STATES), start(grammars, COLORS)
    text, draft = ids_of("aexyaxiay"), ids_of("aeio")
    jobs = grammars.compute([(slow, [*text, *draft], 5), (quick, ids_of("g"), 2)])
    assert quick.wait(60)
    settle(jobs, 0.0)
    assert [mask is None for mask in quick.masks(ids_of("g"), 2)] == [False, False]
    assert (slow.num_masks, slow.failure, slow.is_busy) == (0, "", True)
    assert slow.masks([*text, *draft], 5) == [None] * 5
    assert grammars.compute([(slow, [*text, *ids_of("z")], 1)]) == []  # a draft worker does not wait for slow masks
    assert slow.masks([*text, *ids_of("z")], 1) == [None]
    assert slow.forced(text, 4) == ()
    assert slow.fork() is None
    may_go_on.set()
    assert slow.wait(60)
    assert not any(mask is None for mask in masks_of(grammars, slow, [*text, *draft], 5))


def test_a_mask_that_is_late_is_used_in_the_next_round() -> None:
    grammars = Grammars(FILES, VOCAB, MEMORY, GrammarLimits(small_states=8))
    sequence = start(grammars, MANY_STATES)
    jobs = grammars.compute([(sequence, ids_of("axe"), 1)])
    settle(jobs, 0.0)
    assert (sequence.num_masks, sequence.failure) in ((0, ""), (1, ""))
    assert sequence.wait(60)
    again = grammars.compute([(sequence, ids_of("axe"), 1)])
    settle(again, 60.0)
    assert again[0].masks[0] is jobs[0].masks[0]


def test_masks_of_another_text_are_not_used_again(grammars: Grammars) -> None:
    sequence = start(grammars, "start: /x[ab]*/ | /y[cd]*/")
    masks_of(grammars, sequence, ids_of("x" + 20 * "a"), 20)
    (mask,) = masks_of(grammars, sequence, ids_of("ycdc"), 1)
    assert allowed_by(mask) == {*ids_of("cd"), EOS_TOKEN_ID}


def test_grammars_that_compile_at_once_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a compilation ends before the thread that started it goes on."""
    own, submit = Grammars(FILES, VOCAB, MEMORY), ThreadPoolExecutor.submit
    assert own.error_of(COLORS) == ""

    def late(*args: Any) -> Future[Any]:
        future = submit(*args)
        wait([future], 0.1)
        return future

    monkeypatch.setattr(ThreadPoolExecutor, "submit", late)
    assert own.wait(LIST, 60)
    assert own.error_of(LIST) == ""


def test_compiled_grammars_stay_within_their_memory() -> None:
    """A client's many grammars evict each other. Running sequences do not notice."""
    grammars = Grammars(FILES, VOCAB, 9 * 2**20)
    text = ids_of("axe")
    sequences = [start(grammars, f"start: /(.|\\n)*[aeiou](.|\\n){{{number}}}z1/") for number in range(8, 24)]
    expected = [allowed_by(*masks_of(grammars, each, text, 1)) for each in sequences]
    assert grammars.num_bytes <= 9 * 2**20
    assert [allowed_by(*masks_of(grammars, each, text, 1)) for each in sequences] == expected
    assert grammars.num_bytes <= 9 * 2**20


def test_evicted_grammars_free_their_memory() -> None:
    grammars = Grammars(FILES, VOCAB, 1)
    sequence = start(grammars, MANY_STATES)
    masks_of(grammars, sequence, ids_of("axe"), 1)
    lexer = grammars.lexers.get(MANY_STATES)
    assert lexer is not None
    start(grammars, COLORS)
    assert lexer.is_closed
    with lexer.reading(sequence) as reader:
        assert reader is None


def test_a_grammar_cannot_end_the_text_in_its_middle(grammars: Grammars) -> None:
    sequence = start(grammars, 'start: "a" (<eos> "b" | "c")')
    (mask,) = sequence.masks(ids_of("a"), 1)
    assert allowed_by(mask) == {*ids_of("c")}
    only_end = start(grammars, 'start: "a" <eos> "b"')
    assert only_end.forced(ids_of("a"), 9) == ()
    assert masks_of(grammars, only_end, ids_of("a"), 1) == [None]
    assert "no token" in only_end.failure


def test_many_grammars_wait_for_their_compilation() -> None:
    own = Grammars(FILES, VOCAB, MEMORY, GrammarLimits(max_compiling=3))
    slow = ["start: " + " | ".join(f'"{n}" /[a-z]{{1,9}}{i}x{n}/' for n in range(300)) for i in range(5)]
    for grammar in slow:
        while not own.wait(grammar, 60):
            pass
        assert own.error_of(grammar) == ""


def test_without_the_library_a_grammar_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    without = Grammars(FILES, VOCAB, MEMORY)
    assert without.wait(COLORS, 0)
    assert "llguidance" in without.error_of(COLORS)


def test_the_minimum_length_yields_where_only_the_end_is_allowed(grammars: Grammars) -> None:
    params = SamplingParams(min_tokens=9, stop_token_ids=(EOS_TOKEN_ID, *ids_of("e")), grammar=COLORS)
    rules = SequenceRules(params, start(grammars, COLORS))
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

    def masks(self, token_ids: Sequence[int], count: int) -> list[Words | None]:
        numbers = np.random.default_rng(self._seed)
        return [
            numbers.integers(0, 2**32, self._size, np.uint32) & numbers.integers(0, 2**32, self._size, np.uint32)
            for _ in range(count)
        ]


@settings(max_examples=60)
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
