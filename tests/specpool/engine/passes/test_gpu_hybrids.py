"""Models with recurrent layers on GPU kernels: interpreted, in captured passes, and in draft loops."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_nets import save_delta_net, save_recurrent
from interpreted_kernels import imitate_graphs, imitate_kernels, load_by_kernels
from tiny_models import forget_all, load_engine, random_tokens, transformers_logits
from transformers import AutoModelForCausalLM

from draft_worker.proposer import Proposer
from specpool.engine.cache.checkpoints import NONE, Checkpoints, Segment
from specpool.engine.cache.recurrent import RecurrentArena
from specpool.engine.cache.spans import Span
from specpool.engine.passes.drafts import Draft, DraftRound
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.gpu import layers
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.delta_net import run_segments
from specpool.engine.passes.gpu.model import GpuModel, try_kernels
from specpool.engine.passes.packing import Shape
from specpool.engine.run import pass_selection as forward
from specpool.engine.run import reservation
from specpool.engine.run.engine import Engine
from specpool.engine.startup import loading
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, ProposeRound
from specpool.protocol.sampling import SamplingParams

pytest.importorskip("triton")

# The interpreter is slow.
SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
         "linear_num_value_heads": 2, "linear_value_head_dim": 16}  # fmt: skip
SMALL_CONVS = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
MODELS = {
    "qwen3_5_text": SMALL, "qwen3_next": SMALL | {"mlp_only_layers": []}, "lfm2, biased": SMALL_CONVS,
    "lfm2_moe": SMALL_CONVS,
}  # fmt: skip
LENGTH = 14


def assert_rounds_have_the_bits_of(engine: Engine, expected: torch.Tensor, tokens: list[int]) -> None:
    """Run a prompt, then verifications beside another sequence. Some drafts are rejected, and a round repeated."""
    engine.forward([Span(0, 0, tokens[:4], 1), Span(2, 0, tokens[:2], 1)])
    wrong = [tokens[5], *(token + 1 for token in tokens[6:8])]
    rounds = [
        [Span(2, 2, tokens[2:3], 1), Span(0, 4, [tokens[4], *wrong], 4, num_tentative=3)],
        [Span(0, 6, tokens[6:10], 4, num_tentative=3), Span(2, 3, tokens[3:5], 2, num_tentative=1)],
        [Span(0, 6, tokens[6:10], 4, num_tentative=3)],
        [Span(2, 5, tokens[5:6], 1), Span(0, 10, tokens[10:14], 4)],
    ]
    rows = [engine.forward(spans) for spans in rounds]
    assert torch.equal(rows[0][:3], expected[[2, 4, 5]])
    assert torch.equal(rows[1], expected[[6, 7, 8, 9, 3, 4]])
    assert torch.equal(rows[2], expected[6:10])
    assert torch.equal(rows[3], expected[[5, 10, 11, 12, 13]])


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text",
        "lfm2, biased",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "lfm2_moe")),
    ],
)
def test_kernels_match_transformers_and_decoding_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = save_recurrent(tmp_path, name, **MODELS[name])
    engine = load_by_kernels(monkeypatch, folder, max_model_len=32)
    assert not engine.supports_branches
    tokens = random_tokens(LENGTH)
    expected = engine.forward([Span(1, 0, tokens, LENGTH)])
    torch.testing.assert_close(expected, transformers_logits(folder, tokens), atol=5e-5, rtol=1e-4)
    assert_rounds_have_the_bits_of(engine, expected, tokens)
    drafts = [Draft(Span(slot, at, [5], 1), None, [*tokens[:at], 5], k) for slot, at, k in ((0, LENGTH, 4), (2, 6, 2))]
    assert engine.can_draft(drafts)
    engine.draft([DraftRound(drafts)])
    drafted, rows = [5], list[torch.Tensor]()
    for at in range(LENGTH, LENGTH + 4):
        rows.append(engine.forward([Span(1, at, drafted[-1:], 1)]))
        drafted.append(int(rows[-1].argmax()))
    assert drafts[0].token_ids == drafted[1:]
    assert torch.equal(engine.forward([Span(0, LENGTH + 2, drafted[2:4], 2)]), torch.cat(rows[2:]))


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2, biased"])
def test_kernels_are_tried_before_they_take_over_weights(tmp_path: Path, name: str) -> None:
    folder = save_recurrent(tmp_path, name, **MODELS[name])
    try_kernels(FusedModel(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")))


def test_layers_without_kernels_run_on_torch_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "runs_kernels", lambda device: True)
    folder, tokens = save_recurrent(tmp_path, "kimi_linear"), random_tokens(LENGTH)
    engine = load_engine(folder, native=False, max_sequences=3, max_model_len=32)
    assert isinstance(engine.forward_pass, FusedModel)
    assert engine.bitwise
    assert ["no kernels for" in note for note in engine.notes] == [True]
    expected = engine.forward([Span(1, 0, tokens, LENGTH)])
    assert_rounds_have_the_bits_of(engine, expected, tokens)


def test_passes_have_only_the_segments_that_memory_is_reserved_for(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_delta_net(tmp_path, **SMALL), attn_implementation="eager")
    assert GpuModel(FusedModel(model), 32, max_sequences=3).padded_shape(Shape(9, 3, 3, 3)) == Shape(16, 8, 8, 3)


def test_replayed_passes_have_the_bits_of_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = imitate_graphs(monkeypatch, rows=8)
    engine = load_engine(
        save_delta_net(tmp_path, **SMALL), exact=False, native=False, max_sequences=3, max_model_len=32
    )
    assert isinstance(engine.forward_pass, CapturedModel)
    recurrent, tokens = engine.layout.arena.recurrent, random_tokens(LENGTH)
    assert recurrent is not None
    assert not any(tensor.any() for tensor in (recurrent.states, recurrent.edges, recurrent.inputs, recurrent.gates))
    with engine.forward_pass.eager():
        expected = engine.forward([Span(1, 0, tokens, LENGTH)])
    replayed = fake.replayed
    assert_rounds_have_the_bits_of(engine, expected, tokens)
    assert fake.replayed == replayed + 5


@pytest.mark.slow
@pytest.mark.parametrize("is_exact", [True, False])
def test_the_self_test_covers_the_recurrence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_exact: bool) -> None:
    """The planted bug rounds differently in passes of several sequences."""

    def run(partials: torch.Tensor, *others: Any) -> torch.Tensor:
        is_batch = int((others[2][:, 1] > 0).sum()) > 1
        return run_segments(partials, *others) * (1 + 1e-6 * (is_batch and not is_exact))

    imitate_kernels(monkeypatch)
    monkeypatch.setattr(layers, "run_segments", run)
    folder = save_delta_net(tmp_path, **SMALL)
    engine = load_engine(folder, native=False, cuda_graphs=False, max_sequences=3, max_model_len=64)
    assert isinstance(engine.forward_pass, GpuModel)
    assert engine.bitwise is is_exact


# --- The draft loop


def imitate_segments(
    partials: torch.Tensor, recurrent: RecurrentArena, layer: int, segments: torch.Tensor, taps: torch.Tensor,
    rates: torch.Tensor, biases: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Stands in for `run_segments`, which takes the interpreter too long, with a simpler recurrence."""
    (heads, _, size), (edge, width) = recurrent.sizes.state, recurrent.edges.shape[2:]
    features, results = partials.sum(0), torch.full((partials.shape[1], heads, size), torch.nan)
    states, edges, tails = (each[layer] for each in (recurrent.states, recurrent.edges, recurrent.inputs))
    for segment in (Segment(*numbers) for numbers in segments.tolist() if numbers[1]):
        read, num_replayed = segment.read, segment.start - segment.read_position
        new = features[segment.first_row : segment.first_row + segment.num_rows, :width]
        rows = torch.cat([tails[segment.read_tail, :num_replayed], new])
        history = torch.cat([torch.zeros(edge, width) if read == NONE else edges[read], rows])
        state = torch.zeros(heads, size) if read == NONE else states[read, :, 0].clone()
        num_before = 0 if segment.write == NONE else segment.write_position - segment.read_position
        for at in range(len(rows)):
            state = state * 0.7 + (history[at : at + edge + 1] * taps).sum(0)[: state.numel()].view_as(state)
            if at >= num_replayed:
                results[segment.first_row + at - num_replayed] = state
            if at == num_before - 1:
                states[segment.write, :, 0], edges[segment.write] = state, history[at + 1 : at + 1 + edge]
        kept = rows[max(num_before, num_replayed) :]
        first = len(rows) - len(kept) - num_before
        tails[segment.write_tail, first : first + len(kept)] = kept
    return results


def propose(engine: Engine, seed: int, rounds: int) -> tuple[list[Proposal], list[torch.Tensor]]:
    """Proposals of random rounds, and the cache of each sequence. Rounds reject drafts, end them early, or repeat."""
    proposer, chance, proposals = Proposer(engine), random.Random(seed), list[Proposal]()
    texts = [random_tokens(length, seed=length) for length in (3, 6, 13)]
    cached, rules = [0] * len(texts), (None, None, SamplingParams(0.9, seed=3) if seed % 2 else None)
    for number in range(1, 1 + rounds):
        items = [
            ProposeItem(
                i, cached[i], tuple(text[cached[i] :]), num_draft_tokens=chance.choice((0, 1, 2, 3, 6)),
                min_chance=chance.choice((0.0, 0.0, 0.02, 0.2)), sampling=rules[i],
            )
            for i, text in enumerate(texts)
        ]  # fmt: skip
        for _ in range(chance.choice((1, 1, 2))):
            (made,) = proposer.propose([ProposeRound("a", number, items)])
            proposals += made
        for i, own in enumerate(made):
            assert own.status is ItemStatus.OK
            kept = own.draft_token_ids[: chance.randint(0, len(own.draft_token_ids))]
            cached[i] = min(own.num_cached_tokens, len(texts[i]) + len(kept))
            texts[i] = [*texts[i], *kept, chance.randrange(50)]
    assert engine.slots.checkpoints is not None
    engine.slots.checkpoints.check_integrity()
    arena, slots = engine.layout.arena, [engine.slots["a", i] for i in range(len(texts))]
    columns = [arena.columns_of(slot.index, 0, slot.num_cached_tokens) for slot in slots]
    return proposals, [arena.keys[-1][:, own] for own in columns]


def test_the_draft_loop_has_the_bits_of_single_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tails are short, so that drafts need new checkpoints. Some of these drafts end before their second token."""
    ended, undo = list[bool](), Checkpoints.undo

    def noted(own: Checkpoints, slot: int, segment: Any) -> None:
        ended.append(segment.write >= 0)
        undo(own, slot, segment)

    imitate_graphs(monkeypatch, rows=8)
    monkeypatch.setattr(layers, "run_segments", imitate_segments)
    monkeypatch.setattr(layers, "gated", lambda attended, *_: attended)
    monkeypatch.setattr(layers, "gated_norm", lambda read, *_: read.flatten(1))
    monkeypatch.setattr(loading, "refuse_other_logits", lambda *_: None)
    monkeypatch.setattr(reservation, "tail_rows", lambda _: 8)
    monkeypatch.setattr(reservation, "page_size_of", lambda _: 4)
    monkeypatch.setattr(Checkpoints, "undo", noted)
    folder = save_delta_net(tmp_path, **SMALL)
    looped, stepped = (
        load_engine(folder, exact=False, native=False, max_sequences=3, max_model_len=128) for _ in range(2)
    )
    assert looped.draft_loop is not None
    stepped.draft_loop = None
    for seed in range(4):
        for engine in (looped, stepped):
            forget_all(engine, 3)
        (drafts, keys), (expected, expected_keys) = (propose(engine, seed, rounds=10) for engine in (looped, stepped))
        for own, other in zip(drafts, expected, strict=True):
            assert own.draft_token_ids == other.draft_token_ids
            assert own.num_cached_tokens == other.num_cached_tokens
            assert own.confidences == pytest.approx(other.confidences)
        assert all(map(torch.equal, keys, expected_keys))
    assert any(ended)
