"""Random mixes of rounds, with a target worker that carries a draft, yield the tokens of plain decoding."""

import random

import pytest
from delta_nets import save_delta_net
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_drafts import NUM_TOKENS, Generation, Rounds
from tiny_models import forget_all, load_engine, random_tokens

from draft_worker.proposer import Proposer
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import Branch, ItemStatus, OwnDraftItem, VerifyItem
from specpool.protocol.sampling import SamplingParams
from target_worker.verifier import Verifier

SLOTS, SEQUENCES = 7, 5
PROMPTS = [tuple(random_tokens(35) + random_tokens(length, seed=length)) for length in (2, 15, 40)] + [(7,)]
RULES = [
    None,
    None,
    SamplingParams(temperature=0.8, top_p=0.9, seed=5),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=6),
    SamplingParams(temperature=0.5, seed=3, grammar='start: ("abc" /[a-z]/)*'),
]


class Mix:
    """Random rounds for a few sequences of two coordinators."""

    def __init__(self, target: Engine, draft: Engine, chance: random.Random) -> None:
        self.target, self.draft, self.chance = target, draft, chance
        self.generations = [self._generation(number) for number in range(SEQUENCES)]
        self.expected = [self._plain(each) for each in self.generations]
        forget_all(target, SLOTS)
        forget_all(draft, chance.choice((SLOTS, 3)))
        self.rounds = Rounds(Verifier(target, Proposer(draft)))

    def _generation(self, number: int) -> Generation:
        chance = self.chance
        prompt, rules = chance.choice(PROMPTS), chance.choice(RULES)
        if rules is not None:
            rules = SamplingParams(**{**vars(rules), "prompt_length": len(prompt)})
        namespace, num_logprobs = chance.choice((None, b"x")), chance.choice((None, 2))
        return Generation(number, prompt, rules, num_logprobs, namespace, chance.choice("ab"))

    def _plain(self, like: Generation) -> Generation:
        forget_all(self.target, SLOTS)
        alone = Generation(0, like.prompt, like.sampling, like.num_logprobs)
        Rounds(Verifier(self.target)).generate([alone], 0)
        return alone

    def run(self) -> None:
        """Run a round of some sequences, perhaps twice. Then perhaps lose caches."""
        chance, unfinished = self.chance, [each for each in self.generations if not each.is_finished]
        chosen = chance.sample(unfinished, chance.randint(1, len(unfinished)))
        items = [(each, self._item(each)) for each in chosen]
        hints = {"chances": chance.choice(((), (0.1, 0.6, 0.9))), "step_cost": chance.choice((0.0, 0.0, 0.5))}
        verdicts = self.rounds.send(items, **hints)
        self.target.slots.check_integrity()
        self.draft.slots.check_integrity()
        if chance.random() < 0.3:
            again = self.rounds.repeat(items, **hints)
            assert [(each.status, each.token_ids) for each in again] == [
                (each.status, each.token_ids) for each in verdicts
            ]
            for (_, item), first, second in zip(items, verdicts, again, strict=True):
                if first.status is ItemStatus.OK and item.own_draft is not None:
                    assert first.own_draft is not None
                    assert second.own_draft is not None
                    assert first.own_draft.draft_token_ids == second.own_draft.draft_token_ids
                    assert first.own_draft.num_verified == second.own_draft.num_verified
        if chance.random() < 0.2:
            self._lose(chance.choice(chosen))

    def _lose(self, generation: Generation) -> None:
        """Lose a sequence's cache in one model or both."""
        key = generation.coordinator_id, [generation.sequence_id]
        engine = self.chance.choice((self.draft, self.draft, self.target, None))
        if engine is None:
            self.rounds.verifier.release(*key)
        else:
            engine.slots.release([(key[0], key[1][0])])

    def _item(self, each: Generation) -> VerifyItem:
        chance, fields = self.chance, {}
        own = self._own()
        missing = len(each.prompt) - each.num_cached_tokens
        if missing > 3 and not each.answer and chance.random() < 0.5:
            return each.item(own, end=each.num_cached_tokens + chance.randint(1, missing - 1), want_features=False)
        if chance.random() < 0.3:
            fields["max_draft_tokens"] = chance.randint(1, 6)
        if each.last_round is not None and chance.random() < 0.6:
            return each.continued(own, branches=self._branches(each), **fields)
        base = max(0, each.num_cached_tokens - chance.choice((0, 0, 0, 1, 20)))
        return each.item(own, base=base, draft_token_ids=self._lookup(each, len(each.token_ids)), **fields)

    def _own(self) -> OwnDraftItem | None:
        chance = self.chance
        if chance.random() < 0.1:
            return None
        k, min_chance = chance.randint(0, 8), chance.choice((0.0, 0.0, 0.3))
        return OwnDraftItem(chance.choice((k, k, 0, 2)), k, 0, min_chance, chance.choice((1.0, 0.7)))

    def _lookup(self, each: Generation, end: int) -> tuple[int, ...]:
        """Right and wrong prompt-lookup tokens, or none."""
        right = self.expected[each.sequence_id].token_ids[end : end + self.chance.randint(0, 3)]
        return (*right, *(self.chance.randrange(200) for _ in range(self.chance.randint(0, 1))))

    def _branches(self, each: Generation) -> tuple[Branch, ...]:
        outcome = 0, each.token_ids[-1]
        return (Branch(*outcome, self._lookup(each, len(each.token_ids))),) if self.chance.random() < 0.5 else ()


@pytest.fixture(scope="module", params=["attention", "recurrent"])
def pair(
    request: pytest.FixtureRequest, target: Engine, draft: Engine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, Engine]:
    """A target and its draft. Those with recurrent layers lose caches when rounds begin too early for their states."""
    if request.param == "attention":
        return target, draft
    folder = save_delta_net(tmp_path_factory.mktemp("delta_net"))
    return load_engine(folder), load_engine(folder, exact=False, native=False)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_tokens_equal_plain_decoding(pair: tuple[Engine, Engine], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specpool.engine.run.sequences.GRAMMAR_SECONDS", 60.0)
        mix = Mix(*pair, random.Random(seed))
        while not all(each.is_finished for each in mix.generations):
            mix.run()
    for each, expected in zip(mix.generations, mix.expected, strict=True):
        assert each.answer == expected.answer
        assert each.logprobs[:NUM_TOKENS] == expected.logprobs[:NUM_TOKENS]
