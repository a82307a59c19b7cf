"""The GPU pass on a CPU: interpreted kernels, CUDA graph replay, and the draft loop."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from feature_drafts import encoded_states, random_states, save_feature_draft
from interpreted_kernels import (
    FakeGraphs,
    check_against_transformers,
    imitate_graphs,
    load_by_kernels,
    run_by_kernels,
    shuffle_pages,
)
from test_fused import VARIANTS, save_random
from tiny_models import load_engine, random_tokens, rows_that_differ

from draft_worker.proposer import Proposer
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.passes.drafts import Draft, DraftRound
from specpool.engine.passes.gpu import attention, gemm, graphs, layers
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.graphs import Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.passes.kinds import AttentionKind
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.run import pass_selection as forward
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import Proposal, ProposeItem, ProposeRound
from specpool.protocol.sampling import Reasoning, SamplingParams
from target_worker.loading import load_target

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3", marks=pytest.mark.slow),
        "glm4, biased",
        pytest.param("mistral, window", marks=pytest.mark.slow),
        pytest.param("gemma", marks=pytest.mark.slow),
        "gemma2",
        pytest.param("gemma3_text", marks=pytest.mark.slow),
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("qwen3_moe, not renormalized", marks=pytest.mark.slow),
        pytest.param("glm4_moe", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
    ],
)
def test_kernels_match_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    family, changes = VARIANTS[name]
    window = {"sliding_window": 6} if changes.get("sliding_window") else {}
    folder = save_random(tmp_path, family, {**changes, **window})
    check_against_transformers(load_by_kernels(monkeypatch, folder, max_model_len=26), folder, 2e-5)


@pytest.mark.slow
def test_kernels_run_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_by_kernels(monkeypatch, save_random(tmp_path, *VARIANTS["qwen3"]), max_model_len=40)
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
    monkeypatch.setattr(layers, "attend_pages", refuse)
    engine = load_engine(save_random(tmp_path, *VARIANTS["qwen3"]), native=False, max_model_len=64)
    assert "no such instruction" in engine.info().notes[0]
    assert engine.bitwise


def test_cublas_uses_neither_split_k_nor_reduced_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in gemm.WORKSPACES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_tf32")
    before = {name: getattr(matmul, name) for name in names}
    libraries: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.append)  # fails in CPU builds
    try:
        gemm.restrict_cublas()
        assert {name: gemm.os.environ[name] for name in gemm.WORKSPACES} == gemm.WORKSPACES
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
    return imitate_graphs(monkeypatch, rows=32)


def load_captured(tmp_path: Path, name: str = "llama", **options: object) -> Engine:
    """An engine that replays captured passes of up to 32 rows."""
    engine = load_engine(save_random(tmp_path, *VARIANTS[name]), native=False, **options)
    assert isinstance(engine.forward_pass, CapturedModel)
    return engine


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_replayed_passes_are_batch_invariant(tmp_path: Path, fake_graphs: FakeGraphs, name: str) -> None:
    engine = load_captured(tmp_path, name, max_sequences=6, max_model_len=128)
    assert engine.bitwise
    assert rows_that_differ(engine, lengths=(2, 9, 40), drafts=3) == 0
    assert fake_graphs.replayed > 3 * fake_graphs.captured > 0


@pytest.mark.parametrize(("max_model_len", "window"), [(24, None), (25, 24)])
def test_a_window_of_all_positions_is_full_attention(
    tmp_path: Path, fake_graphs: FakeGraphs, max_model_len: int, window: int | None
) -> None:
    engine = load_captured(tmp_path, "mistral, window", max_sequences=2, max_model_len=max_model_len)
    assert engine.forward_pass.attention_kinds == (AttentionKind(window),)


def test_replays_read_the_page_tables(tmp_path: Path, fake_graphs: FakeGraphs) -> None:
    engine = load_captured(tmp_path, "qwen3", max_sequences=2, max_model_len=96)
    tokens, captured = random_tokens(50), fake_graphs.captured

    def run(slot: int) -> torch.Tensor:
        return torch.cat([engine.forward([Span(slot, at, tokens[at : at + 10], 10)]) for at in range(0, 50, 10)])

    expected = run(0)
    shuffle_pages(engine)
    assert torch.equal(run(1), expected)
    assert any(b - a != 1 for a, b in pairwise(engine.layout.arena.columns_of(1, 0, 50)))
    assert fake_graphs.captured == captured


def test_logits_outlive_the_next_pass_of_their_shape(tmp_path: Path, fake_graphs: FakeGraphs) -> None:
    engine = load_captured(tmp_path, max_sequences=2, max_model_len=64)
    engine.max_num_batched_tokens = 4
    tokens = random_tokens(16)
    first = engine.forward([Span(0, 0, tokens, 16)])
    replayed = fake_graphs.replayed
    second = engine.forward([Span(0, 0, tokens, 16)])
    assert fake_graphs.replayed >= replayed + 4
    assert torch.equal(first, second)


def test_eager_passes_and_drafts_replay_nothing(tmp_path: Path, fake_graphs: FakeGraphs) -> None:
    engine = load_captured(tmp_path, exact=False, max_sequences=2, max_model_len=64)

    def replays() -> int:
        before, draft = fake_graphs.replayed, Draft(Span(0, 0, [5], 1), None, [5, 5], 4)
        engine.draft([DraftRound([draft])])
        assert len(draft.token_ids) == 4
        return fake_graphs.replayed - before

    with engine.forward_pass.eager():
        assert replays() == 0
    assert replays() == 1 + 2  # the pass, then two steps and one


def test_passes_are_captured_at_start_only(
    tmp_path: Path, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Passes of each size are captured twice; the draft loop captures 4, 2 and 1 greedy steps, and 1 sampled step."""
    caplog.set_level("INFO")
    monkeypatch.setattr(attention, "SPLIT", 64)
    engine = load_captured(tmp_path, exact=False, max_sequences=12, max_model_len=160)
    assert fake_graphs.captured == 4 * 2 + 2 * 4
    assert "capturing CUDA graphs" in caplog.text
    assert "captured 16 CUDA graphs in" in caplog.text

    def replays(*lengths: int, cached: int = 0) -> int:
        before = fake_graphs.replayed
        engine.forward([Span(slot, cached, [5] * length, 1) for slot, length in enumerate(lengths)])
        return fake_graphs.replayed - before

    assert [replays(1), replays(1, 1, 1), replays(9, 1), replays(*[1] * 12), replays(32)] == [1] * 5
    assert [replays(33), replays(30, 2, 1)] == [0, 0]
    assert [replays(1, 3, cached=cached) for cached in (60, 64, 100, 127, 128)] == [1] * 5  # more and more splits
    assert fake_graphs.captured == 16
    assert not engine.notes


def test_a_target_captures_no_steps_of_drafts(tmp_path: Path, fake_graphs: FakeGraphs) -> None:
    options = EngineOptions(model=str(save_random(tmp_path, *VARIANTS["llama"])), native=False, max_sequences=2)
    engine = load_target(options, False, lambda phase: None)
    assert fake_graphs.captured == 4 * 2
    assert not engine.notes


def test_padding_to_a_captured_shape_changes_no_bits(tmp_path: Path, fake_graphs: FakeGraphs) -> None:
    """Tokens with and without logits, and a branch."""
    engine = load_captured(tmp_path, "qwen3", max_sequences=3, max_model_len=40)
    tokens = random_tokens(9)
    engine.forward([Span(1, 0, tokens, 1)])
    spans = [Span(0, 0, tokens[:6], 0), Span(2, 0, tokens, 2), Span(1, 4, tokens[:2], 2, 4, 6)]
    replayed = fake_graphs.replayed
    together = engine.forward(spans)
    assert fake_graphs.replayed == replayed + 1
    caches = (*engine.layout.arena.keys, *engine.layout.arena.values)
    before = [cache.clone() for cache in caches]
    with engine.forward_pass.eager():
        assert torch.equal(engine.forward(spans), together)
    assert all(map(torch.equal, caches, before))
    assert engine.forward([Span(0, 6, tokens[:1], 0)]).shape[0] == 0


@pytest.mark.parametrize(
    ("error", "max_rows", "missing"),
    [("operation not permitted when stream is capturing", 0, "8 of 8"), ("CUDA out of memory. Tried", 16, "4 of 8")],
)
def test_shapes_whose_capture_fails_run_eagerly(
    tmp_path: Path, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, error: str, max_rows: int, missing: str
) -> None:
    """Without memory for a graph, smaller graphs are captured."""

    def capture(run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        if len(run()) > max_rows:
            raise RuntimeError(error)
        return fake_graphs(run)

    monkeypatch.setattr(forward, "CudaGraphs", lambda: capture)
    engine = load_captured(tmp_path, max_sequences=6, max_model_len=64)
    assert engine.bitwise
    (note,) = engine.info().notes
    assert note == f"runs slowly: CUDA graph capture failed for {missing} shapes, which run eagerly: {error}"
    replayed, tokens = fake_graphs.replayed, random_tokens(24)
    logits = engine.forward([Span(0, 0, tokens, 1)])
    assert fake_graphs.replayed == replayed
    for token in range(24):
        last = engine.forward([Span(1, token, tokens[token : token + 1], 1)])
    assert torch.equal(logits, last)
    assert (fake_graphs.replayed > replayed) == (max_rows > 0)


def test_shapes_that_lack_memory_before_their_capture_run_eagerly(
    tmp_path: Path, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = GpuModel.forward

    def forward_few(model: GpuModel, batch: PackedBatch) -> torch.Tensor:
        if batch.rows > 16 and not batch.num_logits:  # the padding of a capture
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return run(model, batch)

    monkeypatch.setattr(GpuModel, "forward", forward_few)
    engine = load_captured(tmp_path, exact=False, max_sequences=6, max_model_len=64)
    reason = "4 of 8 shapes, which run eagerly: CUDA out of memory. Tried"
    assert engine.info().notes == (f"runs slowly: CUDA graph capture failed for {reason}",)
    replayed = fake_graphs.replayed
    engine.forward([Span(0, 0, random_tokens(16), 1)])
    engine.forward([Span(0, 0, random_tokens(17), 1)])
    assert fake_graphs.replayed == replayed + 1


class BrokenTorch:
    """Stands in for `torch.cuda` before 2.12: the end of a broken capture raises before it tells the allocator."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pools, self.underway, self.stream = count(), list[int](), "default"
        names = ("Stream", "CUDAGraph", "graph_pool_handle", "current_stream", "set_stream", "synchronize", "graph")
        for name in names:
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch, "zeros", lambda *_, **__: "kept")
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)

    def Stream(self) -> SimpleNamespace:
        return SimpleNamespace(device_index=0)

    def CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: None)

    def graph_pool_handle(self) -> int:
        return next(self.pools)

    def current_stream(self) -> str:
        return self.stream

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert not self.underway

    @contextmanager
    def graph(self, graph: object, pool: int, stream: object, capture_error_mode: str) -> Iterator[None]:
        self.synchronize()
        self.stream = "capture"
        self.underway.append(pool)
        try:
            yield
        except RuntimeError:
            if not hasattr(torch._C, "_cuda_endAllocateToPool"):  # such a version tells the allocator itself
                self.underway.remove(pool)
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        self.underway.remove(pool)
        self.stream = "default"

    def end(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)


@pytest.mark.parametrize("has_private_function", [True, False])
def test_a_failed_capture_leaves_a_usable_process(monkeypatch: pytest.MonkeyPatch, has_private_function: bool) -> None:
    def refuse() -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    broken = BrokenTorch(monkeypatch)
    if not has_private_function:
        monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    capture = graphs.CudaGraphs()
    result = torch.ones(1)
    assert capture(lambda: result)[1] is result
    for _ in range(2):
        with pytest.raises(RuntimeError, match="operation not permitted"):
            capture(refuse)
        torch.cuda.synchronize()
        assert broken.stream == "default"
    assert capture(lambda: result)[1] is result
    assert next(broken.pools) == 3  # a new one after each failure


# --- The draft loop


def propose(
    engine: Engine,
    lengths: tuple[int, ...],
    min_chance: float,
    rounds: int,
    width: int = 0,
    rules: Sequence[SamplingParams | None] = (None,) * 4,
) -> list[Proposal]:
    """Proposals of several rounds, in which half of the draft tokens are accepted. `width`: of the target's states."""

    def features(new: int) -> bytes:
        return encoded_states(random_states(max(1, new - 1), width, 0.3)) if width else b""

    proposer, tokens = Proposer(engine), [random_tokens(3 + 5 * i, seed=i) for i in range(len(lengths))]
    cached: list[int] = [0] * len(lengths)
    collected: list[Proposal] = []
    for number in range(rounds):
        items = [
            ProposeItem(
                sequence_id=i, base_length=cached[i], token_ids=tuple(tokens[i][cached[i] :]),
                num_draft_tokens=length, min_chance=min_chance, features=features(len(tokens[i]) - cached[i]),
                sampling=rules[i],
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


SAMPLED = (
    SamplingParams(0.9, seed=3),
    None,
    SamplingParams(0.7, top_k=40, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    SamplingParams(1.2, seed=5),
)


@pytest.mark.parametrize("reads_states", [False, True])
@pytest.mark.parametrize(
    ("cuda_graphs", "min_chance", "rules"),
    [(False, 0.02, SAMPLED), (True, 0.0, (None,) * 4), (True, 0.02, SAMPLED), (True, 0.02, (*SAMPLED[:3], None))],
)
def test_the_draft_loop_matches_single_steps(
    tmp_path: Path, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool, min_chance: float,
    rules: Sequence[SamplingParams | None], reads_states: bool,
) -> None:  # fmt: skip
    folder = save_feature_draft(tmp_path) if reads_states else save_random(tmp_path, *VARIANTS["qwen3"])
    options = {"native": False, "cuda_graphs": cuda_graphs, "max_sequences": 4, "max_model_len": 128}
    lengths, width = (4, 0, 1, 8), 128 * reads_states  # 7 steps in three graphs

    def run() -> tuple[list[Proposal], list[dict[int, torch.Tensor]]]:
        engine = load_engine(folder, exact=False, **options)
        proposals = propose(engine, lengths, min_chance, rounds=4, width=width, rules=rules)
        return proposals, [engine.slots["a", i].own_states for i in range(len(lengths))]

    looped, looped_states = run()
    monkeypatch.setattr(Engine, "can_draft", lambda *_: False)
    stepped, stepped_states = run()
    for loop, step in zip(looped, stepped, strict=True):
        assert loop.draft_token_ids == step.draft_token_ids
        assert loop.num_cached_tokens == step.num_cached_tokens
        assert loop.confidences == pytest.approx(step.confidences)
    assert any(looped_states) == reads_states
    for of_loop, of_step in zip(looped_states, stepped_states, strict=True):
        assert of_loop.keys() == of_step.keys()
        for position, state in of_loop.items():
            torch.testing.assert_close(state, of_step[position])


REASONING = Reasoning((1,), (2,), starts_inside=False, max_tokens=99, grammar_after=False)


@pytest.mark.parametrize(
    ("rules", "graphs"),
    [((None,) * 2, 1 + 2), (SAMPLED, 1 + 3), ((SamplingParams(0.9, reasoning=REASONING), None), 1 + 3)],
)
def test_a_draft_of_four_tokens_takes_one_round_trip(
    tmp_path: Path, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch,
    rules: Sequence[SamplingParams | None], graphs: int,
) -> None:  # fmt: skip
    """Each call of `forward` uploads tokens, which the host has to read first."""
    engine = load_captured(tmp_path, exact=False, max_sequences=4, max_model_len=64)
    with mock.patch.object(engine, "forward", wraps=engine.forward) as forward_once:
        replayed = fake_graphs.replayed
        propose(engine, (4, 4), 0.0, rounds=1, rules=rules)
        assert forward_once.call_count == 1
        assert fake_graphs.replayed - replayed == graphs
    engine.slots.release_all("a")
    monkeypatch.setattr(Engine, "can_draft", lambda *_: False)
    with mock.patch.object(engine, "forward", wraps=engine.forward) as forward_each:
        propose(engine, (4, 4), 0.0, rounds=1, rules=rules)
        assert forward_each.call_count == 4


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_kernels_run_feature_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    folder = save_feature_draft(tmp_path, architecture)
    options = {"native": False, "max_sequences": 3, "max_model_len": 26}
    spans = feature_spans()
    expected = load_engine(folder, False, **options)
    logits = expected.forward(spans)
    run_by_kernels(monkeypatch)
    engine = load_engine(folder, False, cuda_graphs=False, **options)
    assert isinstance(engine.forward_pass, GpuModel)
    torch.testing.assert_close(engine.forward(spans), logits, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(engine.own_states, expected.own_states, atol=2e-5, rtol=1e-4)


def test_the_projection_of_states_is_compiled_at_start(
    tmp_path: Path, fake_graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    projected, project = list[int](), GpuModel.project

    def record(own: GpuModel, states: torch.Tensor) -> torch.Tensor:
        projected.append(len(states))
        return project(own, states)

    def tiles(sizes: Iterable[int]) -> set[gemm.GemmTile]:
        return {gemm.tile_of(rows, outputs=4096, split_k=2, wide=False, arch=gemm.HOPPER) for rows in sizes}

    monkeypatch.setattr(GpuModel, "project", record)
    monkeypatch.setattr(CapturedModel, "captured_rows", 72)
    load_engine(save_feature_draft(tmp_path), False, native=False, max_sequences=2, max_model_len=64)
    assert tiles(projected) == tiles(range(1, 2049))


def test_replayed_feature_drafts_read_their_own_states(tmp_path: Path, fake_graphs: FakeGraphs) -> None:
    """A pass without states follows one with states in the same graph."""
    engine = load_engine(save_feature_draft(tmp_path), False, native=False, max_sequences=3, max_model_len=64)
    assert isinstance(engine.forward_pass, CapturedModel)
    with_states = feature_spans()
    without = [replace(span, states=None) for span in with_states]
    expected = []
    with engine.forward_pass.eager():
        for spans in (with_states, without):
            expected.append((engine.forward(spans), engine.own_states))
    replayed = fake_graphs.replayed
    for spans, (logits, own_states) in zip((with_states, without), expected, strict=True):
        assert torch.equal(engine.forward(spans), logits)
        assert own_states is not None
        assert engine.own_states is not None
        assert torch.equal(engine.own_states, own_states)
    assert fake_graphs.replayed == replayed + 2
    assert not torch.equal(expected[0][0], expected[1][0])


def feature_spans() -> list[Span]:
    """The spans of two sequences, one with states."""
    tokens = random_tokens(12)
    return [Span(2, 0, tokens, 12, states=random_states(9, 128, 0.5)), Span(0, 0, tokens[:3], 1)]
