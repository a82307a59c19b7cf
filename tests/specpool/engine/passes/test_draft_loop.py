"""The compiled draft loop matches single steps: the same tokens, confidences, lengths and cached bits."""

import ctypes
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from delta_nets import save_recurrent
from feature_drafts import encoded_states, random_states, save_feature_draft
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_models import (
    forget_all,
    load_engine,
    random_tokens,
    save_model,
    save_output_head,
    small_config,
)

from draft_worker.proposer import Proposer
from specpool.engine.passes.drafts import Draft, DraftRound, drafts_of
from specpool.engine.passes.native import draft_loop
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.passes.native.panels import FLOAT32, KIND_NUMBERS, PANEL
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, ProposeRound
from specpool.protocol.sampling import Reasoning, SamplingParams

pytestmark = [pytest.mark.cpus]

SLOTS, MAX_LENGTH = 8, 120
ANY_TEXT = 'start: (/[\\x21-\\x60]/ | "~" /[\\x21-\\x52]/)*'
"""Allows the tokens of the prompts and of the target, and a few others."""
SAMPLED = (
    None,
    None,
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.2, top_k=40, top_p=0.95, seed=-4),
    SamplingParams(temperature=0.7, min_p=0.02, seed=2**64 - 1),
    SamplingParams(temperature=1.0, logit_bias=((5, 3.0), (9, -2.0)), seed=6),
    SamplingParams(temperature=0.8, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3, seed=5),
    SamplingParams(
        temperature=0.8, repetition_penalty=1.4, presence_penalty=-0.6, min_tokens=5, stop_token_ids=(7, 8, 9),
        logit_bias=((5, 1.0), (17, 90.0)), top_p=0.9, seed=8, prompt_length=4,
    ),
    SamplingParams(repetition_penalty=1.6, prompt_length=6),
    SamplingParams(grammar=ANY_TEXT),
    SamplingParams(temperature=0.9, grammar=ANY_TEXT, presence_penalty=0.2, seed=9),
    SamplingParams(reasoning=Reasoning((33,), (34, 35), starts_inside=True, max_tokens=4, grammar_after=False)),
    SamplingParams(
        temperature=0.9, seed=10, grammar=ANY_TEXT, presence_penalty=0.2,
        reasoning=Reasoning((33,), (34,), starts_inside=True, max_tokens=3, grammar_after=True),
    ),
)  # fmt: skip
CHANCES = ((), (0.9,), (0.8, 0.95), (0.92,), (0.1, 0.6, 0.8, 1.0), tuple(i / 20 for i in range(20)))
SOUND_TOKENS = 64
"""In one test, tokens from this one on make all later logits NaN."""


def stepped_engine(folder: Path, **options: object) -> Engine:
    engine = load_engine(folder, exact=False, max_sequences=SLOTS, max_model_len=MAX_LENGTH, **options)
    engine.draft_loop = None
    return engine


def looped_engine(folder: Path, **options: object) -> Engine:
    engine = load_engine(folder, exact=False, max_sequences=SLOTS, max_model_len=MAX_LENGTH, **options)
    assert isinstance(engine.draft_loop, draft_loop.NativeDraftLoop)
    return engine


Engines = tuple[Engine, Engine]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for grammars, however busy the machine is."""
    monkeypatch.setattr("specpool.engine.run.sequences.GRAMMAR_SECONDS", 60.0)


@pytest.fixture(scope="module")
def engines(tiny_pair: tuple[Path, Path]) -> Engines:
    return looped_engine(tiny_pair[1], threads=2), stepped_engine(tiny_pair[1], threads=2)


class Rounds:
    """Random rounds of a few coordinators. The same seed and proposals make the same rounds."""

    def __init__(
        self, seed: int, min_chances: tuple[float, ...] = (0.0, 1e-30, 0.02, 0.3, 0.6), feature_width: int = 0
    ) -> None:
        """`feature_width`: of the target's states, which some items carry; 0: the draft reads none."""
        self._feature_width = feature_width
        self._chance, self._min_chances = random.Random(seed), min_chances
        count = self._chance.randrange(1, SLOTS + 1)
        self._tokens = {number: self._prompt(number) for number in range(count)}
        self._cached = dict.fromkeys(self._tokens, 0)
        self._params = {number: self._params_of(tokens) for number, tokens in self._tokens.items()}
        self._number = 0

    def _prompt(self, number: int) -> list[int]:
        return [token % SOUND_TOKENS for token in random_tokens(self._chance.randrange(1, 20), seed=number)]

    def _params_of(self, prompt: list[int]) -> SamplingParams | None:
        params = self._chance.choice(SAMPLED)
        if params is None or not (params.grammar or params.reasoning):
            return params
        return replace(params, prompt_length=max(0, len(prompt) - 2))  # the target never verifies prompts

    def next(self) -> list[ProposeRound]:
        self._number += 1
        items: list[list[ProposeItem]] = [[], [], []]
        for number in self._tokens:
            items[number % 3].append(self._item(number))
        return [
            ProposeRound(
                f"coordinator {index}", self._number, own,
                self._chance.choice(CHANCES), self._chance.choice((0.0, 0.0, 0.05, 0.4, 2.0)),
            )
            for index, own in enumerate(items)
        ]  # fmt: skip

    def _item(self, number: int) -> ProposeItem:
        tokens, cached, pick = self._tokens[number], self._cached[number], self._chance
        item = ProposeItem(
            number, cached, tuple(tokens[cached:]), sampling=self._params[number],
            num_draft_tokens=pick.choice((0, 1, 2, 4, 7)), min_chance=pick.choice(self._min_chances),
            next_chance=pick.choice((1.0, 0.8, 0.5)),
        )  # fmt: skip
        if item.num_draft_tokens and pick.random() < 0.3:
            item.num_branches, item.num_unverified = pick.randrange(1, 5), min(2, len(item.token_ids) - 1)
        if self._feature_width:
            states = random_states(pick.randrange(len(item.token_ids) + 1), self._feature_width, pick.random())
            item.features = encoded_states(states)
        return item

    def accept(self, rounds: list[ProposeRound], proposals: list[list[Proposal]]) -> None:
        """Accept some draft tokens, and append a token of the target."""
        for round_, own in zip(rounds, proposals, strict=True):
            for item, proposal in zip(round_.items, own, strict=True):
                assert proposal.status is ItemStatus.OK
                number, kept = item.sequence_id, self._chance.randrange(len(proposal.draft_token_ids) + 1)
                length = len(self._tokens[number])
                self._tokens[number] += (*proposal.draft_token_ids[:kept], self._chance.randrange(50))
                self._cached[number] = min(proposal.num_cached_tokens, length + kept)


def run_rounds(engines: Engines, seed: int, count: int = 4, **options: Any) -> list[Proposal]:
    """Run the same rounds on both engines, and compare proposals, states, passes and caches. Return the proposals."""
    collected: list[Proposal] = []
    for engine in engines:
        forget_all(engine, SLOTS)
        for cache in caches_of(engine):
            cache.zero_()
    backends, made = [Proposer(engine) for engine in engines], Rounds(seed, **options)
    for _ in range(count):
        before, rounds = [(engine.passes, engine.tokens) for engine in engines], made.next()
        looped, stepped = (backend.propose(rounds) for backend in backends)
        assert looped == stepped
        assert states_of(engines[0]) == states_of(engines[1])
        assert_own_states_agree(*engines)
        first, second = (
            (engine.passes - passes, engine.tokens - tokens)
            for engine, (passes, tokens) in zip(engines, before, strict=True)
        )
        assert first == second
        assert all(map(torch.equal, *([cache.view(torch.int32) for cache in caches_of(engine)] for engine in engines)))
        made.accept(rounds, looped)
        collected += [proposal for own in looped for proposal in own]
    return collected


def caches_of(engine: Engine) -> list[torch.Tensor]:
    return [*engine.layout.arena.keys, *engine.layout.arena.values]


def states_of(engine: Engine) -> list[tuple[int, list[int]]]:
    slots = engine.slots._slots.values()
    return [(slot.num_cached_tokens, slot.token_ids[: slot.num_cached_tokens]) for slot in slots]


def assert_own_states_agree(first: Engine, second: Engine) -> None:
    for one, other in zip(first.slots._slots.values(), second.slots._slots.values(), strict=True):
        assert one.own_states.keys() == other.own_states.keys()
        assert all(torch.equal(state, other.own_states[length]) for length, state in one.own_states.items())


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
@example(seed=30)  # a draft begins with the mask of an earlier one
def test_drafts_match_single_steps(engines: Engines, seed: int) -> None:
    """Passes mix greedy and sampled sequences, branches, ragged lengths and early ends."""
    run_rounds(engines, seed)


@pytest.fixture(scope="module")
def feature_engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = save_feature_draft(tmp_path_factory.mktemp("features"))
    return looped_engine(folder, threads=2), stepped_engine(folder, threads=2)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_feature_drafts_match_single_steps(feature_engines: Engines, seed: int) -> None:
    """Items with and without the target's states; own states continue drafts, branches and rounds."""
    features = feature_engines[0].loaded.features
    assert features is not None
    run_rounds(feature_engines, seed, feature_width=features.width)


@pytest.mark.parametrize("threads", [1, 3])
def test_thread_counts_change_no_draft(engines: Engines, threads: int) -> None:
    torch.set_num_threads(threads)
    run_rounds(engines, seed=1)


def spoil_embeddings(engine: Engine) -> None:
    """Replace the embeddings of tokens from `SOUND_TOKENS` on with NaN."""
    assert isinstance(engine.forward_pass, NativeModel)
    embedding = engine.forward_pass._model.embedding
    for panel in embedding.panels[SOUND_TOKENS // PANEL : embedding.outputs // PANEL]:
        assert panel.kind == KIND_NUMBERS[FLOAT32]
        ctypes.memset(panel.weight, 0xFF, embedding.inputs * PANEL * 4)


def test_drafts_end_before_logits_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path, small_config("llama"))
    pair, made, draft = (looped_engine(folder), stepped_engine(folder)), list[Draft](), Proposer.draft
    for engine in pair:
        spoil_embeddings(engine)

    def noted(backend: Proposer, rounds: Sequence[DraftRound]) -> None:
        draft(backend, rounds)
        made.extend(drafts_of(rounds))

    monkeypatch.setattr(Proposer, "draft", noted)
    for seed in range(10):
        run_rounds(pair, seed)
    assert {len(each.token_ids) for each in made if each.is_broken} >= {0, 1, 2, 3}


def test_a_head_without_all_tokens(tmp_path: Path) -> None:
    folder = save_model(tmp_path, small_config("llama"))
    save_output_head(folder, [*range(3, 90), 120, 100, 110])
    pair = looped_engine(folder), stepped_engine(folder)
    for seed in range(5):
        run_rounds(pair, seed)


def test_drafts_of_a_mixture_of_experts(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    folder = save_model(tmp_path, small_config("qwen3_moe", **experts))
    pair = looped_engine(folder), stepped_engine(folder)
    for seed in range(5):
        run_rounds(pair, seed)


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_drafts_with_recurrent_layers(tmp_path: Path, name: str) -> None:
    folder = save_recurrent(tmp_path, name)
    pair = looped_engine(folder, threads=2), stepped_engine(folder, threads=2)
    for seed in range(8):
        run_rounds(pair, seed, count=8)


def test_first_tokens_may_take_several_passes(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in engines:
        monkeypatch.setattr(engine, "max_num_batched_tokens", SLOTS * 4)
    run_rounds(engines, seed=7)


def test_passes_of_a_draft_in_progress_count(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog takes a worker for hanging if their number does not grow."""
    looped, seen = engines[0], list[int]()
    loop: Any = looped.draft_loop

    def run(reference: Any) -> None:
        for number in range(3):
            reference._obj.num_passes = number
            seen.append(looped.passes)

    monkeypatch.setattr(loop, "_run", run)
    before = looped.passes
    item = ProposeItem(1, 0, (5, 6), num_draft_tokens=3)
    Proposer(looped).propose([ProposeRound("watched", 1, [item])])
    assert [passes - before for passes in seen] == [1, 2, 3]
    assert looped.passes - before == 3
    looped.slots.release([("watched", 1)])


@pytest.mark.parametrize("missing", ["the draft loop", "sampling"])
def test_without_a_compiler_drafts_run_step_by_step(tiny_pair: tuple[Path, Path], missing: str) -> None:
    name = "compile_library" if missing == "the draft loop" else "compile_sampler"
    with mock.patch.object(draft_loop, name, return_value=None):
        engine = load_engine(tiny_pair[1], exact=False)
    assert isinstance(engine.forward_pass, NativeModel)
    assert engine.draft_loop is None
