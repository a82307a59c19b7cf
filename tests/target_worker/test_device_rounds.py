"""Rounds that the device runs as a whole equal the same rounds run step by step."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import save_eagle_head
from feature_drafts import save_pair_draft
from interpreted_kernels import imitate_graphs, imitate_kernels
from own_drafts import Generation, Rounds
from tiny_models import forget_all, load_engine, random_tokens, save_model, small_config

from draft_worker.proposer import Proposer
from specpool.engine.run.device_round import DeviceRound
from specpool.engine.run.engine import Engine
from specpool.protocol.errors import WorkerFailedError
from specpool.protocol.rounds import ItemStatus, OwnDraftItem, Verdict
from specpool.protocol.sampling import SamplingParams
from target_worker import own_draft
from target_worker.verifier import Verifier

pytest.importorskip("triton")

SLOTS = 4
MAX_DRAFT_LENGTH = 64
"""Positions of the longest sequence."""
FEATURE_LAYERS = {"states": (1, 2), "states in another order": (2, 1), "states twice": (1, 2, 2)}
Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module", params=["plain", "equal", "states", "EAGLE-3"])
def pair(
    request: pytest.FixtureRequest, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A target and a draft on imitated kernels. Passes are captured if the draft reads states."""
    folder, kind = tmp_path_factory.mktemp("pair"), request.param
    target, draft = tiny_pair[0], tiny_pair[kind == "plain"]
    options: dict[str, Any] = {"exact": False, "native": False, "max_sequences": SLOTS}
    with pytest.MonkeyPatch.context() as patch:
        imitate_kernels(patch)
        if kind in FEATURE_LAYERS:
            draft = save_pair_draft(folder / "draft", *tiny_pair, FEATURE_LAYERS[kind])
        elif kind == "EAGLE-3":
            target = save_model(folder / "target", small_config("llama", num_hidden_layers=8))
            draft = save_eagle_head(folder / "head", 3)
        if kind in ("states", "EAGLE-3"):
            imitate_graphs(patch, rows=24)
        draft_options = {"target_model": str(target)} if kind == "EAGLE-3" else {"max_model_len": MAX_DRAFT_LENGTH}
        yield load_engine(target, **options), load_engine(draft, **options, **draft_options)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences of each round that the device ran as a whole."""
    counts, run = [], DeviceRound.run

    def counting(self: DeviceRound, parts: Any, layers: Any) -> Any:
        counts.append(len(parts))
        return run(self, parts, layers)

    monkeypatch.setattr(DeviceRound, "run", counting)
    return counts


def carrying(pair: Pair) -> Rounds:
    for engine in pair:
        forget_all(engine, SLOTS)
    return Rounds(Verifier(pair[0], Proposer(pair[1])))


def play(pair: Pair, seed: int, on_device: bool) -> tuple[list[Verdict], list[list[int]], list[torch.Tensor]]:
    """Play random rounds. Return the verdicts, the rows of the draft's steps, and the draft's cached keys."""
    rounds, chance = carrying(pair), random.Random(seed)
    if not on_device:
        rounds.verifier.drafts.device_rounds._round = None  # type: ignore[union-attr]
    generations = [Generation(i, tuple(random_tokens(length, seed=i))) for i, length in enumerate((3, 12, 40))]
    verdicts, rows = list[Verdict](), list[list[int]]()
    while unfinished := [each for each in generations if not each.is_finished]:
        items = []
        for each in unfinished:
            own = OwnDraftItem(chance.randint(0, 5), chance.randint(0, 5), min_chance=chance.choice((0, 0, 0.2)))
            items.append((each, each.item(own if chance.random() < 0.9 else None)))
        verdicts += rounds.send(items, step_cost=0.05)
        rows.append([*rounds.verifier.draft_rows[1:]])
        if chance.random() < 0.2:
            verdicts += rounds.repeat(items)
        if chance.random() < 0.1:  # preempted
            rounds.verifier.release("c", [unfinished[0].sequence_id])
            unfinished[0].num_cached_tokens = 0
    return verdicts, rows, [*cached_keys(pair[1])]


def cached_keys(engine: Engine) -> Iterator[torch.Tensor]:
    """The cached keys of the last layer by sequence."""
    arena = engine.layout.arena
    for number in range(3):
        if (slot := engine.slots.find(("c", number))) is not None:
            columns = torch.tensor(arena.columns_of(slot.index, 0, slot.num_cached_tokens))
            yield arena.keys[-1][:, columns]


@pytest.mark.parametrize("seed", range(3))
def test_rounds_equal_those_taken_step_by_step(pair: Pair, seed: int, counted: list[int]) -> None:
    verdicts, rows, keys = play(pair, seed, on_device=True)
    assert len(counted) > 3
    expected, expected_rows, expected_keys = play(pair, seed, on_device=False)
    assert rows == expected_rows
    for each, wanted in zip(verdicts, expected, strict=True):
        if each.own_draft is not None and wanted.own_draft is not None:
            assert each.own_draft.confidences == pytest.approx(wanted.own_draft.confidences, rel=1e-4)
            each.own_draft = replace(each.own_draft, confidences=wanted.own_draft.confidences)
        assert each == wanted
    for own, wanted_keys in zip(keys, expected_keys, strict=True):
        count = min(own.shape[1], wanted_keys.shape[1])  # a sequence that ends keeps its rejected tokens, or drops them
        torch.testing.assert_close(own[:, :count], wanted_keys[:, :count])
    for engine in pair:
        engine.slots.check_integrity()


only_plain = pytest.mark.parametrize("pair", ["plain"], indirect=True)


@only_plain
@pytest.mark.parametrize(
    ("rules", "fields"),
    [
        (SamplingParams(temperature=0.8, seed=3, prompt_length=20), {}),
        (SamplingParams(repetition_penalty=1.5, prompt_length=20), {}),
        (None, {"num_logprobs": 1}),
        (None, {"end": 4}),
        (None, {"want_features": True}),
    ],
    ids=["sampled", "penalties", "log-probabilities", "prompt chunk", "features"],
)
def test_other_rounds_are_taken_step_by_step(
    pair: Pair, counted: list[int], rules: SamplingParams | None, fields: dict[str, Any]
) -> None:
    rounds, own, of_round = carrying(pair), OwnDraftItem(3, 3), {}
    if "want_features" in fields:
        of_round = {"feature_layers": (1,), "feature_window": 4}
    plain = Generation(1, tuple(random_tokens(20)))
    rounds.send([(plain, plain.item(own))])
    other = Generation(2, plain.prompt, rules, fields.pop("num_logprobs", None))
    for _ in range(2):
        rounds.send([(plain, plain.item(own)), (other, other.item(own, **fields))], **of_round)
        if "end" in fields:
            fields["end"] *= 2
    assert counted == []
    rounds.send([(plain, plain.item(own))])
    assert counted == [1]


@pytest.mark.parametrize("pair", ["states in another order", "states twice"], indirect=True)
def test_a_draft_that_reads_layers_in_another_order_runs_step_by_step(pair: Pair, counted: list[int]) -> None:
    rounds, generation = carrying(pair), Generation(1, tuple(random_tokens(20)))
    for _ in range(3):
        rounds.send([(generation, generation.item(OwnDraftItem(3, 3)))])
    assert (generation.num_verified, counted) == (6, [])


@only_plain
def test_sequences_without_drafts_join_a_round(pair: Pair, counted: list[int]) -> None:
    rounds, both = carrying(pair), [Generation(i, tuple(random_tokens(20, seed=i))) for i in range(2)]
    rounds.send([(each, each.item(OwnDraftItem(3, 3))) for each in both])
    rounds.send([(both[0], both[0].item(OwnDraftItem(3, 3))), (both[1], both[1].item(None))])
    assert counted == [2]
    rounds.send([(each, each.item(OwnDraftItem(3, 3))) for each in both])
    assert counted == [2], "the draft has to catch up"


@only_plain
def test_sequences_without_room_for_drafts_join_a_round(
    pair: Pair, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, own = carrying(pair), OwnDraftItem(3, 3)
    short, long = Generation(1, tuple(random_tokens(20))), Generation(2, tuple(random_tokens(MAX_DRAFT_LENGTH + 1)))
    rounds.send([(each, each.item(own)) for each in (short, long)])
    monkeypatch.setattr(own_draft, "MIN_CATCHUP", 4)  # the draft has no time for the long sequence
    (_, verdict) = rounds.send([(each, each.item(own)) for each in (short, long)])
    assert counted == [2]
    assert verdict.own_draft is not None
    assert (verdict.own_draft.status, verdict.own_draft.draft_token_ids) == (ItemStatus.CACHE_MISS, ())

    passes, last = pair[1].passes, own._replace(max_length=len(short.token_ids) + 1)
    rounds.send([(short, short.item(last))])
    assert (counted, pair[1].passes) == ([2], passes), "there is nothing to draft"


@only_plain
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_draft_that_is_not_finite_yields_no_tokens(
    pair: Pair, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, generation, own = carrying(pair), Generation(1, tuple(random_tokens(20))), OwnDraftItem(3, 3)
    rounds.send([(generation, generation.item(own))])
    with monkeypatch.context() as patch:
        patch.setattr(pair[1].forward_pass, "forward", spoiled(pair[1]))
        rounds.send([(generation, generation.item(own))])
    (verdict,) = rounds.send([(generation, generation.item(own))])
    assert verdict.own_draft is not None
    assert (verdict.own_draft.draft_token_ids, counted) == ((), [1, 1])

    monkeypatch.setattr(pair[0].forward_pass, "forward", spoiled(pair[0]))
    with pytest.raises(WorkerFailedError, match="logits are not finite"):
        rounds.send([(generation, generation.item(own))])


def spoiled(engine: Engine) -> Callable[[Any], torch.Tensor]:
    """Return a pass of the engine whose logits are not finite."""
    forward = engine.forward_pass.forward
    return lambda batch: torch.full_like(forward(batch), torch.nan)


@only_plain
def test_a_draft_that_fails_costs_only_drafts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(batch: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    rounds, generation, own = carrying(pair), Generation(1, tuple(random_tokens(20))), OwnDraftItem(3, 3)
    rounds.send([(generation, generation.item(own))])
    with monkeypatch.context() as patch:
        patch.setattr(pair[1].forward_pass, "forward", fail)
        rounds.send([(generation, generation.item(own))])
    assert "the round failed on the device (no such kernel); running it step by step" in caplog.messages
    (verdict,) = rounds.send([(generation, generation.item(own))])
    assert verdict.own_draft is not None
    assert verdict.own_draft.draft_token_ids == ()
    rounds.generate([generation], 3)
