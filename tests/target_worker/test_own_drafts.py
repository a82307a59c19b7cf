"""A target worker that carries a draft yields the tokens of plain decoding, and verifies and reports its own drafts."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from own_drafts import NUM_TOKENS, Generation, Rounds
from tiny_models import forget_all, load_engine, random_tokens

from draft_worker.proposer import Proposer
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import ItemStatus, OwnDraft, OwnDraftItem
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
def equal_draft(tiny_pair: tuple[Path, Path]) -> Engine:
    """A draft with the target's model."""
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
    """Return the same sequences, each decoded alone without a draft."""
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
    assert sum(each.num_accepted for each in generations) > 0


@pytest.mark.parametrize("rules", RULES[:4], ids=["greedy", "sampled", "penalties", "greedy penalties"])
def test_the_target_accepts_every_token_of_its_own_model(
    target: Engine, equal_draft: Engine, rules: SamplingParams | None
) -> None:
    """Samples share the target's noise."""
    generation = start(1, rules)
    carrying(target, equal_draft).generate([generation], 4)
    assert generation.num_verified == generation.num_accepted > NUM_TOKENS / 2


# --- Verified and reported drafts


def own_draft(rounds: Rounds, generation: Generation, own: OwnDraftItem | None, **fields: object) -> OwnDraft:
    """Send the sequence's next round. Return the own draft that it reports."""
    (verdict,) = rounds.send([(generation, generation.item(own, **fields))])  # type: ignore[arg-type]
    assert verdict.own_draft is not None
    return verdict.own_draft


def test_a_round_verifies_at_most_what_its_item_allows(target: Engine, equal_draft: Engine) -> None:
    rounds, generation = carrying(target, equal_draft), start(1)
    assert own_draft(rounds, generation, OwnDraftItem(4, 6)).draft_token_ids == ()
    length = len(generation.token_ids)
    for limits, count in (((4, 6), 4), ((8, 6), 6), ((0, 6), 0), ((6, 6, length + 15), 2)):
        found = own_draft(rounds, generation, OwnDraftItem(*limits))
        assert (len(found.draft_token_ids), found.num_verified) == (6, count)
    assert len(generation.token_ids) == length + 4 + 1 + 6 + 1 + 1 + 2 + 1


def test_drafts_end_at_the_maximum_length(target: Engine, equal_draft: Engine) -> None:
    rounds, generation = carrying(target, equal_draft), start(1)
    own_draft(rounds, generation, OwnDraftItem(4, 4, len(generation.prompt) + 3))
    found = own_draft(rounds, generation, OwnDraftItem(4, 4, len(generation.prompt) + 3))
    assert len(found.draft_token_ids) == found.num_verified == 2
    assert own_draft(rounds, generation, OwnDraftItem(4, 4, len(generation.prompt) + 3)).draft_token_ids == ()


def test_unlikely_tokens_are_not_verified(target: Engine, draft: Engine) -> None:
    rounds, generation = carrying(target, draft), start(1)
    own_draft(rounds, generation, OwnDraftItem(0, 4, min_chance=1e-9))
    (verdict,) = rounds.send(
        [(generation, generation.item(OwnDraftItem(4, 0, min_chance=0.5)))], chances=(0.6, 0.7)
    )  # the product of two chances is below 0.5
    assert verdict.own_draft is not None
    assert len(verdict.own_draft.confidences) == len(verdict.own_draft.draft_token_ids) == 4
    assert verdict.own_draft.num_verified == 1


def test_lookup_tokens_are_verified_without_an_own_draft(target: Engine, equal_draft: Engine) -> None:
    (expected,) = plain(target, [start(1)])
    rounds, generation = carrying(target, equal_draft), start(1)
    own_draft(rounds, generation, OwnDraftItem(3, 0))
    right = tuple(expected.token_ids[len(generation.token_ids) :][:5])
    own_draft(rounds, generation, OwnDraftItem(3, 2), draft_token_ids=right)
    assert len(generation.answer) == 1 + 6
    own_draft(rounds, generation, OwnDraftItem(3, 2), draft_token_ids=(0, 0, 0))  # the own draft is right
    assert len(generation.answer) == 1 + 6 + 3
    assert generation.answer == expected.answer[:10]


def test_a_plain_round_keeps_the_rest_of_the_draft(target: Engine, equal_draft: Engine) -> None:
    rounds, generation = carrying(target, equal_draft), start(1)
    own_draft(rounds, generation, OwnDraftItem(0, 4, min_chance=1e-9))
    first = own_draft(rounds, generation, OwnDraftItem(0, 0))
    second = own_draft(rounds, generation, OwnDraftItem(4, 0))
    assert len(first.draft_token_ids) == 4
    assert second.draft_token_ids == first.draft_token_ids[1:]
    assert second.confidences == first.confidences[1:]
    assert second.num_verified == 3
    assert own_draft(rounds, generation, OwnDraftItem(4, 0)).draft_token_ids == ()


def test_a_plain_round_drops_a_draft_that_differs_from_its_tokens(target: Engine, draft: Engine) -> None:
    rounds = carrying(target, draft)
    for number, rules in enumerate([None] * 3 + [SamplingParams(temperature=1.5, seed=seed) for seed in range(3)]):
        generation = start(number, rules)
        own_draft(rounds, generation, OwnDraftItem(0, 3))
        found = own_draft(rounds, generation, OwnDraftItem(0, 0)).draft_token_ids
        is_right = found[0] == generation.token_ids[-1]
        assert own_draft(rounds, generation, OwnDraftItem(0, 0)).draft_token_ids == (found[1:] if is_right else ())
        rounds.verifier.release("c", [number])


def test_a_round_reports_the_rows_of_its_passes(target: Engine, equal_draft: Engine) -> None:
    rounds, two = carrying(target, equal_draft), [start(1), start(2)]
    verifier = rounds.verifier
    first, second = two
    rounds.send([(each, each.item(OwnDraftItem(4, 4))) for each in two])
    assert verifier.draft_rows == [2 * len(first.token_ids), 2, 2, 2]
    proposer = verifier.carried_draft
    assert proposer is not None
    passes, spent, drafted, verified = verifier.passes, verifier.draft_ns, proposer.work.tokens, verifier.work.tokens
    rounds.send([(first, first.item(OwnDraftItem(4, 2))), (second, second.item(OwnDraftItem(4, 3)))])
    assert verifier.draft_rows == [4, 2, 1]  # the last draft token was not cached
    assert verifier.passes - passes == 1 + 3
    assert (verifier.work.tokens - verified, proposer.work.tokens - drafted) == (10, 4 + 2 + 1)
    assert verifier.draft_ns > spent
    rounds.send([(each, each.item(OwnDraftItem(4, 0))) for each in two])
    assert verifier.draft_rows == ()


# --- Catching up


def test_the_draft_follows_a_prompt_chunk_by_chunk(target: Engine, equal_draft: Engine) -> None:
    rounds, generation = carrying(target, equal_draft), start(1, prompt=2)
    for end in (16, 32):
        found = own_draft(rounds, generation, OwnDraftItem(3, 3), end=end)
        assert (found.status, found.num_cached_tokens) == (ItemStatus.OK, end)
        assert rounds.verifier.draft_rows == ()
    own_draft(rounds, generation, OwnDraftItem(3, 3))
    assert rounds.verifier.draft_rows == [len(generation.token_ids) - 32, 1, 1]
    assert own_draft(rounds, generation, OwnDraftItem(3, 3)).num_verified == 3


def test_the_draft_catches_up_over_several_rounds(
    target: Engine, equal_draft: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences with few missing tokens come first."""
    monkeypatch.setattr("target_worker.own_draft.MIN_CATCHUP", 20)
    rounds, long, short = carrying(target, equal_draft), start(1, prompt=2), start(2)
    own_draft(rounds, short, OwnDraftItem(0, 0))
    own_draft(rounds, long, OwnDraftItem(0, 0))
    cached = []
    for _ in range(4):
        rounds.send([(each, each.item(OwnDraftItem(3, 3))) for each in (long, short)])
        slot = rounds.verifier.drafts.proposer.engine.slots.find(("c", 1))  # type: ignore[union-attr]
        cached.append(0 if slot is None else slot.num_cached_tokens)
    assert cached[:2] == [20 - 14, 20 - 14 + 18]
    assert cached[3] == len(long.token_ids) + 2


def test_prefix_cached_tokens_do_not_count_as_catch_up(
    target: Engine, equal_draft: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, first = carrying(target, equal_draft), start(1, prompt=2, cache_namespace=b"x")
    own_draft(rounds, first, OwnDraftItem(3, 3))
    monkeypatch.setattr("target_worker.own_draft.MIN_CATCHUP", 10)
    second = start(2, prompt=2, cache_namespace=b"x")
    own_draft(rounds, second, OwnDraftItem(3, 3))
    assert rounds.verifier.draft_rows == [len(second.prompt) + 1 - 32, 1, 1]
    apart = start(3, prompt=2, cache_namespace=b"y")
    assert own_draft(rounds, apart, OwnDraftItem(3, 3)).num_cached_tokens == 40  # as many as the target ran


@pytest.mark.parametrize("lost", ["draft", "target", "both"])
def test_a_lost_cache_costs_one_round_of_drafts(target: Engine, equal_draft: Engine, lost: str) -> None:
    rounds, generation = carrying(target, equal_draft), start(1, RULES[1])
    own_draft(rounds, generation, OwnDraftItem(3, 3))
    own_draft(rounds, generation, OwnDraftItem(3, 3))
    if lost != "target":
        equal_draft.slots.release([("c", 1)])
    if lost != "draft":
        target.slots.release([("c", 1)])
        generation.num_cached_tokens = 0
    counts = [own_draft(rounds, generation, OwnDraftItem(3, 3)).num_verified for _ in range(2)]
    assert counts == [3 if lost == "draft" else 0, 3]
    assert generation.num_accepted == generation.num_verified


def test_the_draft_drafts_for_all_coordinators_of_a_pass(target: Engine, equal_draft: Engine) -> None:
    rounds, both = carrying(target, equal_draft), [start(1), start(1, coordinator_id="d")]
    rounds.generate(both, 3)
    assert both[0].answer == both[1].answer
    assert [each.num_accepted for each in both] == [each.num_verified for each in both]
    assert both[0].num_verified > 0


def test_sequences_without_a_draft_slot_get_no_drafts(target: Engine, equal_draft: Engine) -> None:
    rounds, first, second = carrying(target, equal_draft), start(1), start(2)
    forget_all(equal_draft, 1)
    own_draft(rounds, first, OwnDraftItem(3, 3))
    found = own_draft(rounds, second, OwnDraftItem(3, 3))
    assert (found.status, found.num_cached_tokens) == (ItemStatus.NO_SLOT, 0)
    rounds.verifier.release("c", [1])
    assert own_draft(rounds, second, OwnDraftItem(3, 3)).status is ItemStatus.OK


def test_released_sequences_leave_both_caches(target: Engine, equal_draft: Engine) -> None:
    rounds, verifier = carrying(target, equal_draft), Verifier(target, Proposer(equal_draft))
    rounds.verifier = verifier

    def hold() -> tuple[int, int]:
        return target.slots.in_use, equal_draft.slots.in_use

    both = [start(number, coordinator_id=owner) for number, owner in enumerate("cd")]
    for owner in "cd":
        verifier.renew_lease(owner, 0.0)
    rounds.send([(each, each.item(OwnDraftItem(2, 2))) for each in both])
    assert hold() == (2, 2)
    assert verifier.carried_draft is not None
    assert verifier.carried_draft.load == equal_draft.load
    assert verifier.info().draft == Proposer(equal_draft).info()
    assert verifier.release("c", [0]) == 1
    assert hold() == (1, 1)
    assert verifier.expire(10.0, 5.0) == 1
    assert hold() == (0, 0)


# --- Failures of the draft


def test_a_draft_that_fails_costs_only_drafts(
    target: Engine, equal_draft: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (expected,) = plain(target, [start(1)])
    rounds, generation = carrying(target, equal_draft), start(1)
    own_draft(rounds, generation, OwnDraftItem(3, 3))
    with monkeypatch.context() as patch:
        patch.setattr(equal_draft, "forward", _fail("no kernel"))
        own_draft(rounds, generation, OwnDraftItem(3, 3))
        assert own_draft(rounds, generation, OwnDraftItem(3, 3)).draft_token_ids == ()
    assert caplog.messages == ["the draft failed (no kernel); continuing without drafts"]
    rounds.generate([generation], 3)
    assert generation.answer == expected.answer
    assert generation.num_accepted > 3


def test_the_host_repeats_a_round_that_ran_out_of_memory(
    target: Engine, equal_draft: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated round finds the same draft."""
    rounds, generation = carrying(target, equal_draft), start(1)
    own_draft(rounds, generation, OwnDraftItem(3, 3))
    item = generation.item(OwnDraftItem(3, 3))
    with monkeypatch.context() as patch:
        patch.setattr(
            equal_draft, "forward", _fail("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate")
        )
        with pytest.raises(RuntimeError, match="can't allocate"):
            rounds.send([(generation, item)])
    (verdict,) = rounds.repeat([(generation, item)])
    assert verdict.own_draft is not None
    assert verdict.own_draft.num_verified == 3
    assert len(verdict.token_ids) == 4


def _fail(message: str) -> object:
    def fail(*arguments: object) -> None:
        raise RuntimeError(message)

    return fail
