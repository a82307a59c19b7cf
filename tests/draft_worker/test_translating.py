"""Rounds in the target's tokens, served by a draft with the same weights but different token ids."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from other_tokenizers import byte_level, files_of, permute_vocabulary, save_tiny
from tiny_models import load_engine

from draft_worker.proposer import Proposer
from draft_worker.translating import TranslatingProposer
from draft_worker.translation import vetting
from draft_worker.translation.sample import SAMPLE
from draft_worker.translation.translation import Translation
from draft_worker.translation.translations import (
    IDLE_SECONDS,
    MAX_TRANSLATIONS,
    MIN_IDLE_SECONDS,
    Translations,
)
from specpool.protocol.errors import InvalidArgumentError, NotFoundError, UnavailableError
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, ProposeRound
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import VOCAB_SIZE, byte_tokenizer

SLOW_SPLIT = {"type": "Split", "pattern": {"Regex": "(a|aa){18}(?!.)"}, "behavior": "Isolated", "invert": False}
PROMPT = [*b"The quick brown fox \xf0\x9f\x8e"]


class Rounds:
    """A draft worker's rounds with one coordinator."""

    def __init__(self, proposer: TranslatingProposer, files: TokenizerFiles, vocab_size: int) -> None:
        self.proposer, self.round_id = proposer, 0
        self.translation_id, self.translation = asyncio.run(proposer.translations.use(files, vocab_size))
        assert isinstance(self.translation, Translation)

    def propose(
        self, base: int, token_ids: Sequence[int], k: int = 4, round_id: int | None = None, **fields: Any
    ) -> Proposal:
        self.round_id += 1
        item = ProposeItem(1, base, tuple(token_ids), num_draft_tokens=k, min_chance=1e-9, **fields)
        number = self.round_id if round_id is None else round_id
        ((proposal,),) = self.proposer.serve([ProposeRound("c", number, [item], translation_id=self.translation_id)])
        return proposal


@pytest.fixture
def permuted(tiny_pair: tuple[Path, Path], tmp_path: Path) -> Rounds:
    engine = load_engine(permute_vocabulary(tiny_pair[0], tmp_path / "draft"), exact=False, max_model_len=64)
    return Rounds(TranslatingProposer(engine), files_of(byte_tokenizer()), VOCAB_SIZE)


def test_drafts_equal_those_without_translation(permuted: Rounds, tiny_pair: tuple[Path, Path]) -> None:
    same = Proposer(load_engine(tiny_pair[0], exact=False))
    item = ProposeItem(1, 0, tuple(PROMPT), num_draft_tokens=4, min_chance=1e-9)
    ((expected,),) = same.propose([ProposeRound("c", 1, [item])])
    proposal = permuted.propose(0, PROMPT)
    assert proposal.draft_token_ids == expected.draft_token_ids
    assert proposal.confidences == pytest.approx(expected.confidences, abs=1e-5)
    assert proposal.num_cached_tokens == expected.num_cached_tokens == len(PROMPT) + 3


def test_accepted_drafts_do_not_run_again(permuted: Rounds) -> None:
    drafts, engine = permuted.propose(0, PROMPT).draft_token_ids, permuted.proposer.engine
    before = engine.tokens
    permuted.propose(len(PROMPT) + 3, [drafts[3], 7], k=1)
    assert engine.tokens == before + 2
    before = engine.tokens
    permuted.propose(len(PROMPT) + 1, [9], k=1)  # the last drafts were rejected
    assert engine.tokens == before + 1


def test_a_repeated_round_gives_the_same_proposal(permuted: Rounds) -> None:
    first = permuted.propose(0, PROMPT)
    assert permuted.propose(0, PROMPT, round_id=1) == first
    second = permuted.propose(len(PROMPT), [5])
    assert permuted.propose(len(PROMPT), [5], round_id=permuted.round_id) == second
    assert permuted.propose(len(PROMPT), [5], round_id=0).status is ItemStatus.STALE_ROUND
    permuted.proposer.engine.slots.check_integrity()


def test_a_lost_or_shorter_sequence_is_a_cache_miss(permuted: Rounds) -> None:
    assert permuted.propose(3, [1]).status is ItemStatus.CACHE_MISS
    end = permuted.propose(0, PROMPT).num_cached_tokens
    assert permuted.propose(end + 1, [1]).status is ItemStatus.CACHE_MISS
    assert permuted.propose(end, [1]).status is ItemStatus.OK
    permuted.proposer.release("c", None)
    assert permuted.propose(end, [1]).status is ItemStatus.CACHE_MISS


def test_a_prefix_that_is_no_longer_cached_is_a_cache_miss(permuted: Rounds) -> None:
    prompt, engine = [*b"The quick brown fox jumps over the lazy dog, and runs away."], permuted.proposer.engine
    fields, before = {"cache_namespace": b"n", "expected_prefix_length": 48}, engine.tokens
    assert permuted.propose(0, prompt, **fields).status is ItemStatus.CACHE_MISS
    assert engine.tokens == before
    first = permuted.propose(0, prompt, cache_namespace=b"n")
    permuted.proposer.release("c", None)
    before = engine.tokens
    assert permuted.propose(0, prompt, **fields).draft_token_ids == first.draft_token_ids
    assert engine.tokens - before < len(prompt) - engine.slots.tables.page_size + 4
    engine.slots.check_integrity()


def test_a_sequence_that_outgrows_the_draft_gets_no_drafts(tmp_path: Path) -> None:
    target, draft = byte_level(900), byte_level(300)
    engine = load_engine(save_tiny(tmp_path / "draft", draft), exact=False, max_model_len=64)
    rounds = Rounds(TranslatingProposer(engine), files_of(target), 900)
    token_ids = target.encode(SAMPLE).ids[:50]
    assert len(draft.encode(target.decode(token_ids)).ids) > 64
    assert rounds.propose(0, token_ids[:10]).draft_token_ids
    for base, new in ((10, token_ids[10:]), (49, [4, 5]), (0, token_ids)):
        proposal = rounds.propose(base, new)
        assert (proposal.status, proposal.draft_token_ids) == (ItemStatus.OK, ())
        assert proposal.num_cached_tokens == base + len(new)
    assert rounds.propose(10, token_ids[10:12]).draft_token_ids
    engine.slots.check_integrity()
    with pytest.raises(InvalidArgumentError, match=r"^items\[0\]: needs 68 positions"):
        rounds.propose(0, [4] * 65)


async def trusted(files: TokenizerFiles, vocab_size: int) -> None:
    """Accept any tokenizer."""


async def test_translations_are_kept_while_in_use() -> None:
    now = 0.0
    translations = Translations(files_of(byte_level(300)), 300, lambda: now, vet=trusted)

    async def use(size: int) -> str:
        return (await translations.use(files_of(byte_level(size)), size))[0]

    ids = [await use(size) for size in range(310, 310 + MAX_TRANSLATIONS)]
    with pytest.raises(UnavailableError, match="4 translations are in use"):
        await use(400)
    now = MIN_IDLE_SECONDS + 1
    for translation_id in (ids[0], *ids[2:]):
        translations.get(translation_id)
    ids[1:2] = [await use(400)]  # replaces the only idle one
    for translation_id in ids:
        translations.get(translation_id)
    with pytest.raises(UnavailableError):
        await use(410)
    now += IDLE_SECONDS
    translations.get(ids[0])
    now += 1
    translations.expire()
    translations.get(ids[0])
    for translation_id in (*ids[1:], "unknown"):
        with pytest.raises(NotFoundError, match="call UseTokenizer"):
            translations.get(translation_id)


async def test_refusals_make_room_for_other_tokenizers() -> None:
    translations = Translations(files_of(byte_level(300)), 300, vet=trusted)
    used, _ = await translations.use(files_of(byte_level(310)), 310)
    for size in range(2 * MAX_TRANSLATIONS):
        translation_id, reason = await translations.use(TokenizerFiles(b"{}" + b" " * size, "", {}, ()), 300)
        assert str(reason).startswith("the target's tokenizer is not supported: it cannot be read")
        with pytest.raises(NotFoundError):
            translations.get(translation_id)
    translations.get(used)


async def test_a_cancelled_call_kills_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    program = "import os, sys, time, pathlib; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(vetting, "COMMAND", [sys.executable, "-c", program, str(begun)])
    translations = Translations(files_of(byte_level(300)), 300)
    calls = [
        asyncio.create_task(translations.use(TokenizerFiles(b" " * size, "", {}, ()), 300)) for size in range(1, 9)
    ]
    while not (begun.exists() and begun.read_text()):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
    monkeypatch.setattr(vetting, "COMMAND", [sys.executable, "-c", "raise SystemExit(3)"])
    assert (await translations.use(TokenizerFiles(b"{}", "", {}, ()), 300))[1] == ""  # no cancelled call blocks it


async def test_a_tokenizer_is_not_refused_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    translations, files = Translations(files_of(byte_level(300)), 300), files_of(byte_level(310))
    with monkeypatch.context() as patch:
        patch.setattr(vetting, "PATIENCE", 0)
        with pytest.raises(UnavailableError, match="too little processor time"):
            await translations.use(files, 310)
    assert isinstance((await translations.use(files, 310))[1], Translation)


def refusal(tokenizer_json: bytes) -> str:
    translations = Translations(files_of(byte_level(300)), 300)
    return str(asyncio.run(translations.use(TokenizerFiles(tokenizer_json, "", {}, ()), 300))[1])


def test_tokenizers_are_vetted_in_a_limited_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(b"{}").startswith("it cannot be read")
    whole = files_of(byte_level(300)).tokenizer_json
    assert refusal(whole).startswith("Translation(")
    slow = json.loads(whole) | {"pre_tokenizer": SLOW_SPLIT}
    assert re.search(r"^encoding 4407 bytes takes \d+\.\d s, more than 0\.5 s", refusal(json.dumps(slow).encode()))
    with monkeypatch.context() as patch:
        patch.setattr(vetting, "MEMORY", 0)
        patch.setattr(vetting, "MEMORY_PER_BYTE", 1)
        assert re.search("takes too much memory|or crashes", refusal(b"[" + b"[]," * 2_000_000 + b"0]"))
    monkeypatch.setattr(vetting, "COMMAND", [sys.executable, "-c", "import os; os.abort()"])
    assert "or crashes (status -6)" in refusal(whole)
