"""The GPU pass on a CPU: interpreted kernels, CUDA graph replay, and the draft loop."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interpreted_kernels import FakeGraphs, imitate_kernels, run_by_kernels
from test_fused import VARIANTS, save_random
from tiny_models import load_engine, random_tokens, rows_that_differ, transformers_logits

from draft_worker.proposer import Proposer
from specpool.engine.cache.spans import Span
from specpool.engine.passes.gpu import cublas, graphs, model
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.graphs import Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.run import pass_selection as forward
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import Proposal, ProposeItem, ProposeRound

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama, tied, biased", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.slow),
        "glm4, biased",
    ],
)
def test_kernels_match_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run_by_kernels(monkeypatch)
    folder = save_random(tmp_path, *VARIANTS[name])
    engine = load_engine(folder, False, native=False, cuda_graphs=False, max_sequences=3, max_model_len=26)
    assert isinstance(engine.forward_pass, GpuModel)
    assert not engine.notes
    tokens = random_tokens(20)
    together = engine.forward([Span(2, 0, tokens, 20), Span(0, 0, tokens[:3], 1)])
    expected = transformers_logits(folder, tokens)
    torch.testing.assert_close(together, torch.cat([expected, expected[2:3]]), atol=2e-5, rtol=1e-4)
    assert torch.equal(engine.forward([Span(1, 0, tokens[:3], 1)]), together[20:])


def test_kernels_run_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_by_kernels(monkeypatch)
    folder = save_random(tmp_path, *VARIANTS["qwen3"])
    engine = load_engine(folder, False, native=False, cuda_graphs=False, max_sequences=3, max_model_len=40)
    tokens, offsets = random_tokens(17), (1, 5)
    tails = [random_tokens(3, seed=seed) for seed in (1, 2)]
    expected = torch.cat([engine.forward([Span(1, 0, [*tokens, *tail], 3)]) for tail in tails])
    engine.forward([Span(0, 0, [*tokens, 1], 0)])
    spans = [Span(0, 17, tail, 3, 17, offset) for tail, offset in zip(tails, offsets, strict=True)]
    assert torch.equal(engine.forward(spans), expected)


def test_a_note_says_why_kernels_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(forward, "runs_kernels", lambda device: True)
    monkeypatch.setattr(model, "attend_extents", refuse)
    engine = load_engine(save_random(tmp_path, *VARIANTS["qwen3"]), native=False, max_model_len=64)
    assert "no such instruction" in engine.info().notes[0]
    assert engine.bitwise


def test_cublas_uses_neither_split_k_nor_reduced_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cublas.WORKSPACES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_tf32")
    before = {name: getattr(matmul, name) for name in names}
    libraries: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.append)  # fails in CPU builds
    try:
        cublas.restrict_cublas()
        assert {name: cublas.os.environ[name] for name in cublas.WORKSPACES} == cublas.WORKSPACES
        assert not any(getattr(matmul, name) for name in names)
        assert not matmul.allow_bf16_reduced_precision_reduction_split_k
        assert not matmul.allow_fp16_reduced_precision_reduction_split_k
        assert libraries == ["cublaslt"]
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


# --- CUDA graphs


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    fake = FakeGraphs()
    imitate_kernels(monkeypatch)
    monkeypatch.setattr(forward, "CudaGraphs", lambda: fake)
    return fake


def test_replayed_passes_are_batch_invariant(tmp_path: Path, fake_graphs: FakeGraphs) -> None:
    folder = save_random(tmp_path, *VARIANTS["qwen3"])
    engine = load_engine(folder, native=False, max_sequences=6, max_model_len=128)
    assert isinstance(engine.forward_pass, CapturedModel)
    assert engine.bitwise
    assert rows_that_differ(engine, lengths=(2, 9, 40), drafts=3) == 0
    assert fake_graphs.replayed > 3 * fake_graphs.captured > 0


def test_logits_outlive_the_next_pass_of_their_shape(tmp_path: Path, fake_graphs: FakeGraphs) -> None:
    engine = load_engine(save_random(tmp_path, *VARIANTS["llama"]), native=False, max_sequences=2, max_model_len=64)
    engine.max_num_batched_tokens = 4
    tokens = random_tokens(16)
    first = engine.forward([Span(0, 0, tokens, 16)])
    replayed = fake_graphs.replayed
    second = engine.forward([Span(0, 0, tokens, 16)])
    assert fake_graphs.replayed >= replayed + 4
    assert torch.equal(first, second)


def test_an_engine_runs_eagerly_if_capture_fails(
    tmp_path: Path, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(forward, "CudaGraphs", lambda: refuse)
    engine = load_engine(save_random(tmp_path, *VARIANTS["llama"]), native=False, max_sequences=4, max_model_len=64)
    assert engine.bitwise
    assert "CUDA graph capture failed (operation not permitted" in caplog.text
    assert "CUDA graph capture failed" in engine.info().notes[0]


def test_batches_have_few_shapes_and_recent_ones_stay_captured(
    tmp_path: Path, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    folder = save_random(tmp_path, *VARIANTS["llama"])
    draft = load_engine(folder, exact=False, native=False, max_sequences=24, max_model_len=64)

    def captures(*rows: int) -> int:
        before = fake_graphs.captured
        for count in rows:
            draft.forward([Span(slot, 0, [5], 1) for slot in range(count)])
        return fake_graphs.captured - before

    captures(1, 9, 17)
    captures(1, 9)
    assert captures(2, 3, 5, 8, 10, 16) == 0
    assert captures(17) == 1  # evicts the graph of 8 rows
    assert captures(9, 16, 24, 20) == 0
    assert captures(1) == 1
    sizes = {draft.forward_pass.padded_rows(count) for count in range(1, 513)}
    assert len(sizes) == 18


# --- The draft loop


def propose(engine: Engine, lengths: tuple[int, ...], min_chance: float, rounds: int) -> list[Proposal]:
    """Proposals of several rounds, in which half of the draft tokens are accepted."""
    proposer, tokens = Proposer(engine), [random_tokens(3 + 5 * i, seed=i) for i in range(len(lengths))]
    cached: list[int] = [0] * len(lengths)
    collected: list[Proposal] = []
    for number in range(rounds):
        items = [
            ProposeItem(
                sequence_id=i, base_length=cached[i], token_ids=tuple(tokens[i][cached[i] :]),
                num_draft_tokens=length, max_length=100, min_chance=min_chance,
            )
            for i, length in enumerate(lengths)
        ]  # fmt: skip
        proposals = proposer.propose([ProposeRound("a", number + 1, items)])[0]
        collected += proposals
        for i, proposal in enumerate(proposals):
            accepted = proposal.draft_token_ids[: len(proposal.draft_token_ids) // 2]
            cached[i] = len(tokens[i]) + len(accepted[:-1])
            tokens[i] = [*tokens[i], *accepted, 7]
    return collected


@pytest.mark.parametrize(("cuda_graphs", "min_chance"), [(False, 0.02), (True, 0.0), (True, 0.02)])
def test_the_draft_loop_matches_single_steps(
    tmp_path: Path, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool, min_chance: float
) -> None:
    folder = save_random(tmp_path, *VARIANTS["qwen3"])
    options = {"native": False, "cuda_graphs": cuda_graphs, "max_sequences": 4, "max_model_len": 128}
    lengths = (4, 0, 1, 6)
    looped = propose(load_engine(folder, exact=False, **options), lengths, min_chance, rounds=4)
    monkeypatch.setattr(Engine, "can_draft", lambda *_: False)
    stepped = propose(load_engine(folder, exact=False, **options), lengths, min_chance, rounds=4)
    for loop, step in zip(looped, stepped, strict=True):
        assert loop.draft_token_ids == step.draft_token_ids
        assert loop.num_cached_tokens == step.num_cached_tokens
        assert loop.confidences == pytest.approx(step.confidences)
