"""A carried feature draft drafts the same tokens as a draft worker that gets the same hidden states."""

from pathlib import Path
from typing import Any

import pytest
from eagle_heads import save_eagle_head
from feature_drafts import save_pair_draft
from mtp_models import save_mtp_target
from own_drafts import Generation, Rounds
from tiny_models import forget_all, load_engine, random_tokens, save_model, small_config

from draft_worker.proposer import Proposer
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import ItemStatus, OwnDraftItem, ProposeItem, ProposeRound, VerifyRound
from specpool.protocol.sampling import SamplingParams
from target_worker.verifier import Verifier

PROMPT = tuple(random_tokens(40))
K, WINDOW = 3, 64
MTP_FAMILIES: dict[str, dict[str, Any]] = {"glm4_moe": {"num_hidden_layers": 4}, "qwen3_5_text": {}}


@pytest.fixture(scope="module", params=["trained draft", "EAGLE-1", "EAGLE-3", "glm4_moe", "qwen3_5_text"])
def engines(
    request: pytest.FixtureRequest, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, Engine]:
    """A target, and a draft that reads the target's states."""
    folder = tmp_path_factory.mktemp("features")
    if request.param == "trained draft":
        draft = save_pair_draft(folder, *tiny_pair, (1, 2))
        return load_engine(tiny_pair[0]), load_engine(draft, exact=False)
    if request.param in MTP_FAMILIES:
        target = save_mtp_target(folder, request.param, **MTP_FAMILIES[request.param])
        return load_engine(target), load_engine(Path("mtp"), exact=False, target_model=str(target))
    target = save_model(folder / "target", small_config("llama", num_hidden_layers=8))
    head = save_eagle_head(folder / "head", int(request.param[-1]))
    return load_engine(target), load_engine(head, exact=False, target_model=str(target))


def drafted_apart(target: Engine, draft: Engine, rules: SamplingParams | None) -> list[tuple[int, ...]]:
    """Return the draft of each round from a draft worker that gets the states over the wire."""
    verifier, proposer, layers = Verifier(target), Proposer(draft), draft.info().feature_layers
    alone, drafts, features, read = Generation(9, PROMPT, rules), [], b"", 0
    for round_id in range(1, 30):
        item = alone.item(None, want_features=True)
        if alone.answer:
            tokens = tuple(alone.token_ids[read:])
            item_of_draft = ProposeItem(9, read, tokens, sampling=rules, num_draft_tokens=K, features=features)
            ((proposal,),) = proposer.propose([ProposeRound("c", round_id, [item_of_draft])])
            assert proposal.status is ItemStatus.OK
            item.draft_token_ids, read = proposal.draft_token_ids, len(alone.token_ids)
            drafts.append(proposal.draft_token_ids)
        round_ = VerifyRound("c", round_id, [item], feature_layers=layers, feature_window=WINDOW)
        ((verdict,),) = verifier.verify([round_])
        features = verdict.features
        alone.take(item, verdict, round_id)
        if alone.is_finished:
            break
    return drafts


@pytest.mark.parametrize("rules", [None, SamplingParams(temperature=0.7, seed=3, prompt_length=len(PROMPT))])
@pytest.mark.parametrize("chunk", [None, 16])
def test_all_states_are_read(engines: tuple[Engine, Engine], rules: SamplingParams | None, chunk: int | None) -> None:
    target, draft = engines
    for engine in engines:
        forget_all(engine, 4)
    expected = drafted_apart(target, draft, rules)
    for engine in engines:
        forget_all(engine, 4)
    rounds, carried, found = Rounds(Verifier(target, Proposer(draft))), Generation(1, PROMPT, rules), []
    own = OwnDraftItem(K, K, len(PROMPT) + 100)
    while chunk is not None and carried.num_cached_tokens + chunk < len(PROMPT):
        rounds.send([(carried, carried.item(own, end=carried.num_cached_tokens + chunk))])
    while not carried.is_finished:
        (verdict,) = rounds.send([(carried, carried.item(own))])
        assert verdict.own_draft is not None
        assert verdict.own_draft.status is ItemStatus.OK
        assert verdict.own_draft.num_cached_tokens == len(carried.token_ids)
        found.append(verdict.own_draft.draft_token_ids)
        assert not verdict.features
    assert found[1:] == expected


def test_states_wait_for_the_first_draft(engines: tuple[Engine, Engine]) -> None:
    """Plain rounds keep the states that a later draft reads."""
    target, draft = engines
    for engine in engines:
        forget_all(engine, 4)
    rounds = Rounds(Verifier(target, Proposer(draft)))
    early, late = Generation(1, PROMPT), Generation(2, PROMPT)
    for _ in range(5):
        items = early.item(OwnDraftItem(0, K)), late.item(OwnDraftItem(0, 0), want_features=True)
        rounds.send([(early, items[0]), (late, items[1])])
        states = target.slots["c", 2].carried.states
        assert states.untyped_storage().nbytes() == states.nbytes  # not a view of the whole pass's states
    rounds.send([(early, early.item(OwnDraftItem(0, K))), (late, late.item(OwnDraftItem(0, K)))])
    found = rounds.send([(each, each.item(OwnDraftItem(K, 0))) for each in (early, late)])
    drafts = [verdict.own_draft.draft_token_ids for verdict in found if verdict.own_draft is not None]
    assert len(drafts[0]) == K
    assert drafts[0] == drafts[1]


def test_coordinators_get_the_layers_that_they_want(engines: tuple[Engine, Engine]) -> None:
    target, draft = engines
    for engine in engines:
        forget_all(engine, 4)
    alone, carried = Generation(1, PROMPT), Generation(2, PROMPT)
    wanted = {"feature_layers": (1, 3), "feature_window": 5}
    (expected,) = Rounds(Verifier(target)).send([(alone, alone.item(None, want_features=True))], **wanted)
    rounds = Rounds(Verifier(target, Proposer(draft)))
    (verdict,) = rounds.send([(carried, carried.item(OwnDraftItem(K, K), want_features=True))], **wanted)
    assert len(verdict.features) == 5 * 2 * target.facts.hidden_size * 2
    assert verdict.features == expected.features
