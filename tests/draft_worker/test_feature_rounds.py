"""Feature drafts in the draft worker: states of the target, the draft's own states, and malformed bytes."""

import logging
from pathlib import Path

import pytest
import torch
from feature_drafts import encoded_states, random_states, save_feature_draft
from tiny_models import forget_all, load_engine, random_tokens

from draft_worker.branches import _warn
from draft_worker.proposer import Proposer
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, ProposeRound
from specpool.protocol.sampling import SamplingParams

WIDTH, PROMPT = 128, tuple(random_tokens(12))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_engine(save_feature_draft(tmp_path_factory.mktemp("features")), exact=False)


@pytest.fixture
def proposer(engine: Engine) -> Proposer:
    forget_all(engine, 8)
    _warn.cache_clear()
    return Proposer(engine)


def propose(proposer: Proposer, round_id: int, *items: ProposeItem) -> list[Proposal]:
    (proposals,) = proposer.propose([ProposeRound("c", round_id, items)])
    assert all(proposal.status is ItemStatus.OK for proposal in proposals)
    return proposals


def drafted(engine: Engine, tokens: tuple[int, ...], states: torch.Tensor, count: int) -> tuple[int, ...]:
    """A greedy draft, step by step in a slot that no sequence has. `states`: of the target, after the first token."""
    result: list[int] = []
    span = Span(7, 0, tokens, 1, states=states)
    for _ in range(count):
        row = engine.forward([span]).argmax(-1)
        result += engine.head.token_ids(row).tolist()
        assert engine.own_states is not None
        span = Span(7, span.end, result[-1:], 1, own_states={0: engine.own_states[0]})
    return tuple(result)


def test_states_of_rounds_replace_own_states(proposer: Proposer) -> None:
    """Each round carries the states before its new tokens, so the draft of the next one sees all of them."""
    states = random_states(11, WIDTH, 0.1)
    item = ProposeItem(1, 0, PROMPT, num_draft_tokens=4, features=encoded_states(states))
    (proposal,) = propose(proposer, 1, item)
    expected = drafted(proposer.engine, PROMPT, states, 4)
    assert proposal.draft_token_ids == expected
    # The target accepts two tokens, and chooses another one.
    tokens, after = (*expected[:2], 99), random_states(3, WIDTH, 0.2)
    item = ProposeItem(1, 12, tokens, num_draft_tokens=4, features=encoded_states(after))
    (proposal,) = propose(proposer, 2, item)
    assert proposal.draft_token_ids == drafted(proposer.engine, PROMPT + tokens, torch.cat([states, after]), 4)
    assert proposal.num_cached_tokens == 12 + 3 + 3


def test_own_states_stand_in_for_missing_ones(proposer: Proposer) -> None:
    """Wherever the next round begins within the draft, and also if the round is repeated."""
    for base, end in ((17, 18), (16, 17), (16, 18), (14, 15), (12, 13), (12, 16), (12, 18)):
        (whole,) = propose(proposer, base, ProposeItem(base, 0, PROMPT, num_draft_tokens=8))
        tokens = PROMPT + whole.draft_token_ids
        for _ in range(2):
            item = ProposeItem(base, base, tokens[base:end], num_draft_tokens=20 - end)
            (proposal,) = propose(proposer, base, item)
            assert proposal.draft_token_ids == tokens[end:]


def test_own_states_of_other_tokens_are_dropped(proposer: Proposer) -> None:
    (whole,) = propose(proposer, 1, ProposeItem(1, 0, PROMPT, num_draft_tokens=8))
    tokens = (*PROMPT, *whole.draft_token_ids[:2], 5, *whole.draft_token_ids[3:5])
    (first,) = propose(proposer, 2, ProposeItem(1, 12, tokens[12:], num_draft_tokens=4))
    assert sorted(proposer.engine.slots["c", 1].own_states) == [12, 13, 14, 17, 18, 19, 20]
    (again,) = propose(proposer, 2, ProposeItem(1, 12, tokens[12:], num_draft_tokens=4))
    assert first.draft_token_ids == again.draft_token_ids


def test_sequences_of_a_round_keep_states_in_memory_of_their_own(proposer: Proposer) -> None:
    """Otherwise, an idle sequence would keep the states of all sequences of its last round."""
    propose(proposer, 1, *(ProposeItem(number, 0, PROMPT, num_draft_tokens=number) for number in (1, 2, 4)))
    for number in (1, 2, 4):
        states = proposer.engine.slots["c", number].own_states
        assert sorted(states) == [12 + i for i in range(number)]
        assert all(state.untyped_storage().nbytes() == number * state.nbytes for state in states.values())


def test_branches_continue_with_own_states(proposer: Proposer) -> None:
    (whole,) = propose(proposer, 1, ProposeItem(1, 0, PROMPT, num_draft_tokens=6))
    first, second, *rest = whole.draft_token_ids
    item = ProposeItem(1, 12, (first, second), num_draft_tokens=3, num_branches=6, num_unverified=1)
    (ahead,) = propose(proposer, 2, item)
    branches = {branch.outcome: branch.draft_token_ids for branch in ahead.branches}
    assert branches[1, rest[0]] == tuple(rest[1:])
    shorter = [outcome for outcome in branches if outcome[0] == 0]
    for number, (_, token) in enumerate(shorter, 2):
        propose(proposer, 1, ProposeItem(number, 0, PROMPT, num_draft_tokens=2))
        (proposal,) = propose(proposer, 2, ProposeItem(number, 12, (first, token), num_draft_tokens=3))
        assert proposal.draft_token_ids == branches[0, token]
    assert shorter


def test_states_of_branch_rounds_belong_to_committed_tokens(proposer: Proposer) -> None:
    """Tokens that the target is still verifying follow them."""
    states, drafts = random_states(11, WIDTH, 0.1), (5, 6)
    item = ProposeItem(
        1, 0, PROMPT + drafts, num_draft_tokens=3, num_branches=4, num_unverified=2, features=encoded_states(states)
    )
    propose(proposer, 1, item)
    padded = torch.cat([states, torch.zeros(2, WIDTH)])
    proposer.engine.forward([Span(7, 0, PROMPT + drafts, 3, states=padded)])
    own, expected = proposer.engine.slots["c", 1].own_states, proposer.engine.own_states
    assert expected is not None
    assert torch.equal(torch.stack([own[length] for length in (12, 13, 14)]), expected)
    assert all(state.untyped_storage().nbytes() <= 3 * expected[0].nbytes for state in own.values())


@pytest.mark.parametrize(
    "malformed",
    [b"x", bytes(2 * WIDTH - 2), bytes(2 * WIDTH * 13), bytes(2 * WIDTH * 2 + 2), b"\xff" * 2 * WIDTH],
    ids=["a byte", "less than a row", "more rows than tokens", "no whole rows", "NaN"],
)
def test_malformed_states_count_as_missing(
    proposer: Proposer, malformed: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (expected,) = propose(proposer, 1, ProposeItem(1, 0, PROMPT, num_draft_tokens=4))
    with caplog.at_level(logging.WARNING):
        for number in (2, 3):
            (proposal,) = propose(proposer, 1, ProposeItem(number, 0, PROMPT, num_draft_tokens=4, features=malformed))
            assert proposal.draft_token_ids == expected.draft_token_ids
    assert [record.message for record in caplog.records] == [
        "ignoring features that are not rows of 128 finite bfloat16 numbers for the last tokens"
    ]


def test_a_lost_cache_is_a_miss(proposer: Proposer) -> None:
    item = ProposeItem(1, 5, (7,), num_draft_tokens=4, features=bytes(2 * WIDTH))
    ((proposal,),) = proposer.propose([ProposeRound("c", 1, [item])])
    assert proposal.status is ItemStatus.CACHE_MISS


def test_forced_tokens_have_no_states(proposer: Proposer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states belong to the tokens of the item."""
    monkeypatch.setattr("specpool.engine.run.sequences.GRAMMAR_SECONDS", 60.0)
    states, rules = random_states(3, WIDTH, 0.3), SamplingParams(grammar='start: "abc" /[a-z]*/', prompt_length=12)
    item = ProposeItem(1, 0, PROMPT, sampling=rules, num_draft_tokens=5, features=encoded_states(states))
    (proposal,) = propose(proposer, 1, item)
    padded = torch.cat([states, torch.zeros(3, WIDTH)])
    forced = proposal.draft_token_ids[:3]
    proposer.engine.forward([Span(7, 0, PROMPT + forced, 1, states=padded)])
    actual, expected = proposer.engine.slots["c", 1].own_states[15], proposer.engine.own_states
    assert expected is not None
    assert torch.equal(actual, expected[0])


def test_causal_drafts_ignore_states(tiny_pair: tuple[Path, Path]) -> None:
    proposer = Proposer(load_engine(tiny_pair[1], exact=False))
    items = ProposeItem(1, 0, PROMPT, num_draft_tokens=4), ProposeItem(2, 0, PROMPT, num_draft_tokens=4, features=b"x")
    first, second = propose(proposer, 1, *items)
    assert first.draft_token_ids == second.draft_token_ids
    assert not proposer.engine.slots["c", 1].own_states


def test_states_that_arrive_late_replace_cached_pages(proposer: Proposer) -> None:
    """The prefix cache holds the sequence's own pages, which lack them."""
    page_size = proposer.engine.slots.tables.page_size
    tokens = tuple(random_tokens(3 * page_size + 5))
    states = random_states(len(tokens) - page_size, WIDTH, 0.1)
    propose(proposer, 1, ProposeItem(1, 0, tokens, cache_namespace=b"x"))
    item = ProposeItem(1, page_size, tokens[page_size:], num_draft_tokens=4, features=encoded_states(states))
    (late,) = propose(proposer, 2, item)
    assert late.draft_token_ids == drafted(proposer.engine, tokens, states, 4)


def test_an_expected_prefix_needs_no_states(proposer: Proposer) -> None:
    page_size = proposer.engine.slots.tables.page_size
    tokens = tuple(random_tokens(2 * page_size + 5))
    propose(proposer, 1, ProposeItem(1, 0, tokens, cache_namespace=b"x"))
    states = random_states(len(tokens) - page_size, WIDTH, 0.1)
    item = ProposeItem(
        2, 0, tokens, num_draft_tokens=4, cache_namespace=b"x", expected_prefix_length=page_size,
        features=encoded_states(states),
    )  # fmt: skip
    (proposal,) = propose(proposer, 1, item)
    assert proposal.draft_token_ids == drafted(proposer.engine, tokens, states, 4)
