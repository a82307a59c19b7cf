"""A draft with recurrent layers drafts as if it had read each sequence at once, whatever was rejected or repeated."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from delta_nets import save_delta_net
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import forget_all, load_engine, random_tokens

from draft_worker.proposer import Proposer
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, ProposeRound

MAX_LENGTH = 256
K = 4


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = save_delta_net(tmp_path_factory.mktemp("draft"))
    return load_engine(folder, exact=False, max_model_len=MAX_LENGTH, max_sequences=2)


class Rounds:
    """Rounds of a sequence. A second sequence reads all tokens at once."""

    def __init__(self, engine: Engine, chance: random.Random) -> None:
        self.proposer, self.chance = Proposer(engine), chance
        self.tokens = random_tokens(chance.randint(1, 90), seed=chance.randrange(3))
        self.round_id = self.cached = 0

    def propose(self, item: ProposeItem, *, is_new: bool = True) -> Proposal:
        self.round_id += is_new
        ((proposal,),) = self.proposer.propose([ProposeRound("c", self.round_id, [item])])
        self.proposer.engine.slots.check_integrity()
        return proposal

    def fresh(self, tokens: Sequence[int], **fields: Any) -> Proposal:
        self.proposer.release("c", [2])
        return self.propose(ProposeItem(2, 0, tuple(tokens), **fields))

    def follow(self) -> None:
        """Run a chunk of the prompt."""
        if self.cached < len(self.tokens):
            end = self.chance.randint(self.cached + 1, len(self.tokens))
            self._take(ProposeItem(1, self.cached, tuple(self.tokens[self.cached : end])))

    def draft(self) -> tuple[int, ...]:
        """Draft after all tokens. Return the draft."""
        base = min(self.cached, len(self.tokens) - 1)
        min_chance = self.chance.choice((0.0, 0.02, 0.9))  # which often end drafts early
        fields: dict[str, Any] = {"num_draft_tokens": K, "min_chance": min_chance}
        proposal = self._take(ProposeItem(1, base, tuple(self.tokens[base:]), **fields))
        assert proposal.draft_token_ids == self.fresh(self.tokens, **fields).draft_token_ids
        return proposal.draft_token_ids

    def draft_ahead(self, unverified: tuple[int, ...]) -> None:
        """Draft a branch during the verification."""
        base, branching = min(self.cached, len(self.tokens) - 1), {"num_draft_tokens": K, "num_branches": 3}
        branching["num_unverified"] = len(unverified)
        proposal = self._take(ProposeItem(1, base, (*self.tokens[base:], *unverified), **branching))
        assert proposal.branches == self.fresh((*self.tokens, *unverified), **branching).branches

    def gain(self, accepted: Sequence[int]) -> None:
        """Commit accepted tokens and one more."""
        self.cached = min(self.cached, len(self.tokens) + len(accepted))
        self.tokens += [*accepted, self.chance.randrange(200)]

    def _take(self, item: ProposeItem) -> Proposal:
        count = self.chance.choice((1, 1, 2)) if len(item.token_ids) < 16 else 1  # a long tail has no room for drafts
        proposals = [self.propose(item, is_new=not i) for i in range(count)]
        assert {proposal.status for proposal in proposals} == {ItemStatus.OK}, "the draft lost a state"
        assert all(proposal == proposals[0] for proposal in proposals)
        self.cached = proposals[0].num_cached_tokens
        return proposals[0]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_no_round_loses_a_state(draft: Engine, seed: int) -> None:
    forget_all(draft, 2)
    chance = random.Random(seed)
    rounds = Rounds(draft, chance)
    for _ in range(chance.randint(0, 3)):
        rounds.follow()
    while len(rounds.tokens) < MAX_LENGTH - 80:
        if chance.random() < 0.5:
            drafted = rounds.draft()
        else:
            drafted = tuple(random_tokens(chance.choice((0, 3, 8)), seed=len(rounds.tokens)))
            rounds.draft_ahead(drafted)
        if chance.random() < 0.9:  # otherwise, the target has failed
            rounds.gain(drafted[: chance.randint(0, len(drafted))])


def test_a_draft_that_ends_at_once_keeps_its_state(draft: Engine) -> None:
    """The rows after the prompt have no room in its tail, so that longer drafts would begin another one."""
    forget_all(draft, 2)
    rounds = Rounds(draft, random.Random(0))
    tokens, fields = random_tokens(60), {"num_draft_tokens": 9}
    proposal = rounds.propose(ProposeItem(1, 0, tuple(tokens), min_chance=1.0, **fields))
    assert (len(proposal.draft_token_ids), proposal.num_cached_tokens) == (1, 60)
    proposal = rounds.propose(ProposeItem(1, 60, (7,), **fields))
    assert proposal.draft_token_ids == rounds.fresh([*tokens, 7], **fields).draft_token_ids


def test_drafts_are_no_longer_than_a_tail(draft: Engine) -> None:
    forget_all(draft, 2)
    rounds, prompt = Rounds(draft, random.Random(0)), random_tokens(35)
    long = rounds.fresh(prompt, num_draft_tokens=100).draft_token_ids
    assert len(long) == draft.slots.max_draft_tokens
    for count in (1, 20, len(long) - 1):
        assert rounds.fresh([*prompt, *long[:count]], num_draft_tokens=1).draft_token_ids == long[count : count + 1]
