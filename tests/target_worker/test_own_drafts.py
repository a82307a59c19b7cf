"""A target worker that carries a draft: the tokens are those of plain decoding, and drafts are what they seem."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_drafts import NUM_TOKENS, Generation, Rounds
from tiny_models import forget_all, load_engine, random_tokens

from draft_worker.proposer import Proposer
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import Branch, ItemStatus, OwnDraft, OwnDraftItem, VerifyItem
from specpool.protocol.sampling import SamplingParams
from target_worker.verifier import Verifier

SLOTS = 6
PROMPTS = [tuple(random_tokens(length, seed=length)) for length in (1, 12, 40)]
RULES = [
    None,
    SamplingParams(temperature=0.8, top_p=0.9, seed=5),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=6),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=0.5, seed=3, grammar='start: ("abc" /[a-z]/)*'),
]


@pytest.fixture(autouse=True)
def _patient_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.engine.run.sequences.GRAMMAR_SECONDS", 60.0)


@pytest.fixture(scope="module")
def target(tiny_pair: tuple[Path, Path]) -> Engine:
    return load_engine(tiny_pair[0])


@pytest.fixture(scope="module")
def draft(tiny_pair: tuple[Path, Path]) -> Engine:
    return load_engine(tiny_pair[1], exact=False)


@pytest.fixture(scope="module")
def equal_draft(tiny_pair: tuple[Path, Path]) -> Engine:
    """The target's own model as a draft."""
    return load_engine(tiny_pair[0])


def carrying(target: Engine, draft: Engine) -> Rounds:
    forget_all(target, SLOTS)
    forget_all(draft, SLOTS)
    return Rounds(Verifier(target, Proposer(draft)))


def start(number: int, rules: SamplingParams | None = None, prompt: int = 1, **fields: object) -> Generation:
    if rules is not None:
        rules = SamplingParams(**{**vars(rules), "prompt_length": len(PROMPTS[prompt])})
    return Generation(number, PROMPTS[prompt], rules, **fields)  # type: ignore[arg-type]


def plain(target: Engine, generations: Sequence[Generation]) -> list[Generation]:
    """The same sequences, decoded alone without a draft."""
    forget_all(target, SLOTS)
    done = []
    for each in generations:
        done.append(Generation(each.sequence_id, each.prompt, each.sampling, each.num_logprobs))
        Rounds(Verifier(target)).generate(done[-1:], 0)
        Verifier(target).release("c", None)
    return done


@pytest.mark.parametrize("rules", RULES, ids=["greedy", "sampled", "penalties", "greedy penalties", "grammar"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_tokens_equal_plain_decoding(target: Engine, draft: Engine, rules: SamplingParams | None, k: int) -> None:
    generations = [start(number, rules, prompt, num_logprobs=2) for number, prompt in enumerate((0, 1, 2))]
    expected = plain(target, generations)
    carrying(target, draft).generate(generations, k)
    assert [each.answer for each in generations] == [each.answer for each in expected]
    assert [each.logprobs[:NUM_TOKENS] for each in generations] == [each.logprobs[:NUM_TOKENS] for each in expected]
    assert 0 < sum(each.num_accepted for each in generations)


@pytest.mark.parametrize("rules", RULES[:4], ids=["greedy", "sampled", "penalties", "greedy penalties"])
def test_the_target_accepts_every_token_of_its_own_model(
    target: Engine, equal_draft: Engine, rules: SamplingParams | None
) -> None:
    """Samples share the target's noise."""
    generation = start(1, rules)
    carrying(target, equal_draft).generate([generation], 4)
    assert generation.num_verified == generation.num_accepted > NUM_TOKENS / 2
