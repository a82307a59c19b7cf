"""A target with recurrent layers gives the tokens of plain decoding, whatever is rejected, repeated, lost or shared."""

import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from delta_nets import save_recurrent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import forget_all, load_engine, random_tokens

from specpool.engine.run.engine import Engine
from specpool.engine.run.reservation import CHECKPOINTS_PER_SLOT
from specpool.protocol.rounds import ItemStatus, Verdict, VerifyItem, VerifyRound
from specpool.protocol.sampling import SamplingParams
from specpool.testing import VOCAB_SIZE
from target_worker.verifier import Verifier

SEQUENCES, MAX_LENGTH = 5, 200
PROMPTS = [tuple(random_tokens(70) + random_tokens(length, seed=length)) for length in (3, 26, 50)]
"""The second ends with a page."""
SAMPLING = SamplingParams(temperature=1.5, seed=7, repetition_penalty=1.2)
Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""A prompt and its answer, and the log-probabilities of the answer's tokens."""


class Answers(list[Answer]):
    def __repr__(self) -> str:  # in reports of failing examples
        return "..."


ENGINES: list[Any] = [
    ("qwen3_5_text", {}),
    pytest.param(("qwen3_5_text", {"native": False}), marks=pytest.mark.slow),
    ("qwen3_5_text", {"kv_layout": "padded"}),
    ("qwen3_next", {}),
    ("lfm2", {}),
]


@pytest.fixture(scope="module", params=ENGINES, ids=lambda each: "{} {}".format(*each))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    name, options = request.param
    folder = save_recurrent(tmp_path_factory.mktemp("model"), name)
    return load_engine(folder, max_model_len=MAX_LENGTH, max_sequences=SEQUENCES - 1, **options)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Answers:
    """The answers to all prompts, first greedy, then sampled, decoded alone without drafts."""
    verifier = Verifier(engine)
    return Answers(decode(verifier, number) for number in range(2 * len(PROMPTS)))


def decode(verifier: Verifier, number: int) -> Answer:
    tokens, chances = [*prompt_of(number)], list[float]()
    while len(tokens) < MAX_LENGTH:
        base = len(tokens) - 1 if chances else 0
        item = VerifyItem(number, base, tuple(tokens[base:]), sampling=sampling_of(number, base), logprobs=0)
        ((verdict,),) = verifier.verify([VerifyRound("plain", len(tokens), [item])])
        tokens += verdict.token_ids
        chances += verdict.logprobs.logprobs
    verifier.release("plain", None)
    return tuple(tokens), tuple(chances)


def prompt_of(number: int) -> tuple[int, ...]:
    return PROMPTS[number % len(PROMPTS)]


def sampling_of(number: int, base: int) -> SamplingParams | None:
    return None if base or number % 6 < len(PROMPTS) else SAMPLING


class Rounds:
    """Rounds of a few sequences in one worker."""

    def __init__(self, engine: Engine, plain: Answers, chance: random.Random) -> None:
        self.engine, self.verifier, self.plain, self.chance = engine, Verifier(engine), plain, chance
        self.cached: dict[int, int] = {}
        """Tokens that the worker has cached. The next one is known, too, unless the prompt is incomplete."""
        self.round_id = 0

    def run(self) -> None:
        """Verify drafts for some sequences, and repeat the round if its answer is lost."""
        self.round_id += 1
        chosen = self.chance.sample(range(SEQUENCES), self.chance.randint(1, SEQUENCES))
        items = [self.item(number) for number in chosen]
        for _ in range(self.chance.choice((1, 1, 2))):
            verdicts = self.verify(deepcopy(items))
        for number, verdict in zip(chosen, verdicts, strict=True):
            if verdict.status is ItemStatus.OK:
                self.cached[number] = verdict.num_cached_tokens
            elif verdict.status is ItemStatus.CACHE_MISS:
                del self.cached[number]
            if self.cached.get(number, 0) > MAX_LENGTH - 50:
                self.release(number)

    def verify(self, items: list[VerifyItem]) -> list[Verdict]:
        (verdicts,) = self.verifier.verify([VerifyRound("c", self.round_id, items)])
        self.engine.slots.check_integrity()
        for item, verdict in zip(items, verdicts, strict=True):
            end = verdict.num_cached_tokens + 1
            start, (tokens, chances) = end - len(verdict.token_ids), self.plain[item.sequence_id % 6]
            assert verdict.token_ids == tokens[start:end]
            first = start - len(prompt_of(item.sequence_id))
            assert tuple(verdict.logprobs.logprobs) == chances[first : first + len(verdict.token_ids)]
        return verdicts

    def item(self, number: int) -> VerifyItem:
        """The next tokens of a sequence, perhaps from an earlier position, with right and wrong draft tokens."""
        tokens, prompt, cached = self.plain[number % 6][0], prompt_of(number), self.cached.get(number, 0)
        base = max(0, cached - self.chance.choice((0, 0, 0, 0, 1, 20)))
        end = max(len(prompt), cached + 1)
        is_prefill = base < len(prompt) - 10 and self.chance.random() < 0.5
        if is_prefill:
            end = self.chance.randint(base + 1, len(prompt) - 1)
        right = tokens[end : end + self.chance.choice((0, 1, 5, 40))]
        wrong = tuple(self.chance.choices(range(VOCAB_SIZE), k=self.chance.choice((0, 1, 3))))
        return VerifyItem(
            number,
            base,
            tokens[base:end],
            draft_token_ids=() if is_prefill else (right + wrong)[: MAX_LENGTH - end],
            prefill_only=is_prefill,
            sampling=sampling_of(number, base),
            logprobs=0,
            cache_namespace=self.chance.choice((b"x", b"x", None)) if base == 0 else None,
        )

    def release(self, number: int) -> None:
        self.verifier.release("c", [number])
        self.cached.pop(number, None)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), limit=st.sampled_from([24, 64, 512]))
def test_rounds_change_no_bit(engine: Engine, plain: Answers, seed: int, limit: int) -> None:
    """Sequences that share prefixes compete for slots, in passes of different sizes."""
    forget_all(engine, SEQUENCES - 1)
    engine.max_num_batched_tokens = limit
    rounds = Rounds(engine, plain, random.Random(seed))
    for _ in range(25):
        rounds.run()
        if rounds.cached and rounds.chance.random() < 0.2:
            rounds.release(rounds.chance.choice([*rounds.cached]))


@pytest.fixture
def fresh(engine: Engine) -> Engine:
    forget_all(engine, SEQUENCES - 1)
    engine.max_num_batched_tokens = 512
    return engine


def test_long_drafts_are_verified_up_to_a_tail(fresh: Engine, plain: Answers) -> None:
    """The next round continues after any of the tokens."""
    prompt, (tokens, _), rows = PROMPTS[0], plain[0], fresh.slots.max_draft_tokens
    verifier, end = Verifier(fresh), len(PROMPTS[0])
    item = VerifyItem(0, 0, prompt, draft_token_ids=tokens[end : end + rows + 20])
    ((verdict,),) = verifier.verify([VerifyRound("c", 1, [item])])
    assert verdict.token_ids == tokens[end : end + rows + 1]
    start = verdict.num_cached_tokens
    item = VerifyItem(0, 0, (), after_round_id=1, draft_token_ids=(*tokens[start + 1 : start + 5], 0))
    ((verdict,),) = verifier.verify([VerifyRound("c", 2, [item])])
    assert verdict.token_ids == tokens[start + 1 : start + 6]


def test_a_failed_pass_is_repeated_in_smaller_passes(
    fresh: Engine, plain: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, (tokens, _) = PROMPTS[2], plain[2]
    verifier, end = Verifier(fresh), len(PROMPTS[2])
    verifier.verify([VerifyRound("c", 1, [VerifyItem(0, 0, prompt)])])
    round_ = VerifyRound("c", 2, [VerifyItem(0, 0, (), after_round_id=1, draft_token_ids=tokens[end + 1 : end + 9])])
    run = fresh.forward_pass.forward

    def fail_after_the_pass(batch: object) -> torch.Tensor:
        run(batch)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(fresh.forward_pass, "forward", fail_after_the_pass)
        with pytest.raises(RuntimeError):
            verifier.verify([deepcopy(round_)])
    fresh.max_num_batched_tokens = 4
    ((verdict,),) = verifier.verify([round_])
    assert verdict.token_ids == tokens[end + 1 : end + 10]


def test_lost_rounds_are_repeated_from_a_prefix(fresh: Engine, plain: Answers) -> None:
    """The coordinator lost three results, and resumes before the checkpoints that the worker still has."""
    prompt, (tokens, chances) = PROMPTS[0], plain[0]
    verifier, end, wrong = Verifier(fresh), len(PROMPTS[0]), (tokens[len(PROMPTS[0])] + 1) % VOCAB_SIZE
    verifier.verify([VerifyRound("c", 1, [VerifyItem(0, 0, prompt, cache_namespace=b"x")])])
    for round_id in (2, 3, 4):
        start = fresh.slots["c", 0].num_cached_tokens
        drafts = (*tokens[start + 1 : start + 4], wrong)
        item = VerifyItem(0, 0, (), after_round_id=round_id - 1, draft_token_ids=drafts)
        ((verdict,),) = verifier.verify([VerifyRound("c", round_id, [item])])
        assert verdict.token_ids[:4] == tokens[start + 1 : start + 5]
    drafts = tokens[end + 1 : end + 11]
    ((verdict,),) = verifier.verify(
        [VerifyRound("c", 5, [VerifyItem(0, end, tokens[end : end + 1], draft_token_ids=drafts)])]
    )
    assert verdict.status is ItemStatus.CACHE_MISS
    item = VerifyItem(0, 0, tokens[: end + 1], draft_token_ids=drafts, logprobs=0, cache_namespace=b"x")
    ((verdict,),) = verifier.verify([VerifyRound("c", 6, [item])])
    assert verdict.prefix_length == (0 if fresh.layout.is_padded else 64)
    assert verdict.token_ids == tokens[end + 1 : end + 12]
    assert tuple(verdict.logprobs.logprobs) == chances[1:12]


def test_states_are_shared_only_within_a_namespace(fresh: Engine, plain: Answers) -> None:
    """Others' prompts may evict a state, which costs time but changes no token."""
    verifier, prompt, count = Verifier(fresh), PROMPTS[0], 0

    def found(prompt: tuple[int, ...], namespace: bytes | None) -> tuple[int, tuple[int, ...]]:
        nonlocal count
        count += 1
        item = VerifyItem(count, 0, prompt, cache_namespace=namespace)
        ((verdict,),) = verifier.verify([VerifyRound("c", count, [item])])
        verifier.release("c", None)
        fresh.slots.check_integrity()
        return verdict.prefix_length, verdict.token_ids

    token_ids = plain[0][0][len(prompt) :][:1]
    whole_pages = 0 if fresh.layout.is_padded else 64
    assert [found(prompt, namespace) for namespace in (b"a", b"b", None)] == [(0, token_ids)] * 3
    assert found(prompt, b"a") == (whole_pages, token_ids)
    for seed in range(fresh.slots.total * CHECKPOINTS_PER_SLOT):
        found(tuple(random_tokens(40, seed=1000 + seed)), b"c")
    assert [found(prompt, b"a") for _ in range(2)] == [(0, token_ids), (whole_pages, token_ids)]
