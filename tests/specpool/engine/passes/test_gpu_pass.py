"""The GPU's pass on a CPU: whole engines of kernels, recorded passes, and drafts without a host in the loop."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interpreted_kernels import Recorder, imitate_kernels, run_by_kernels
from test_fused import VARIANTS, save_random
from tiny_models import load_engine, random_tokens, rows_that_differ, transformers_logits

from draft_worker.proposer import Proposer
from specpool.engine.cache.spans import Span
from specpool.engine.passes.gpu import graphs, model
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.graphs import Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.run import pass_selection as forward
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import Proposal, ProposeItem

pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["llama, tied, biased", "qwen3", "glm4, biased"])
def test_an_engine_of_kernels_has_the_librarys_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
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


def test_what_the_kernels_lack_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(forward, "runs_kernels", lambda device: True)
    monkeypatch.setattr(model, "attend_extents", refuse)
    engine = load_engine(save_random(tmp_path, *VARIANTS["qwen3"]), native=False, max_model_len=64)
    reason = "runs slowly, on torch operations, because its kernels cannot run here: no such instruction"
    assert engine.info().notes == (reason,)
    assert engine.bitwise


# --- Recorded passes


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    imitate_kernels(monkeypatch)
    monkeypatch.setattr(forward, "CudaGraphs", lambda: recorder)
    return recorder


def test_a_recorded_engine_gives_the_same_bits(tmp_path: Path, recorder: Recorder) -> None:
    folder = save_random(tmp_path, *VARIANTS["qwen3"])
    recorded = load_engine(folder, native=False, max_sequences=6, max_model_len=128)
    assert isinstance(recorded.forward_pass, CapturedModel)
    assert recorded.bitwise
    assert rows_that_differ(recorded, lengths=(2, 9, 40), drafts=3) == 0
    assert recorder.replayed > 3 * recorder.recorded > 0


def test_logits_outlive_the_next_pass_of_their_shape(tmp_path: Path, recorder: Recorder) -> None:
    engine = load_engine(save_random(tmp_path, *VARIANTS["llama"]), native=False, max_sequences=2, max_model_len=64)
    engine.max_num_batched_tokens = 4
    tokens = random_tokens(16)
    in_pieces = engine.forward([Span(0, 0, tokens, 16)])
    replayed = recorder.replayed
    again = engine.forward([Span(0, 0, tokens, 16)])
    assert recorder.replayed >= replayed + 4
    assert torch.equal(in_pieces, again)


def test_what_cannot_be_recorded_is_launched(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(forward, "CudaGraphs", lambda: refuse)
    engine = load_engine(save_random(tmp_path, *VARIANTS["llama"]), native=False, max_sequences=4, max_model_len=64)
    assert engine.bitwise
    assert "cannot be captured, and are launched: operation not permitted" in caplog.text
    assert "CUDA graph capture failed" in engine.info().notes[0]


def test_batches_have_few_shapes_of_which_the_last_used_stay_recorded(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MOST_RECORDINGS", 2)
    folder = save_random(tmp_path, *VARIANTS["llama"])
    draft = load_engine(folder, exact=False, native=False, max_sequences=24, max_model_len=64)

    def recorded(*rows: int) -> int:
        before = recorder.recorded
        for count in rows:
            draft.forward([Span(slot, 0, [5], 1) for slot in range(count)])
        return recorder.recorded - before

    recorded(1, 9, 17)
    recorded(1, 9)
    assert recorded(2, 3, 5, 8, 10, 16) == 0
    assert recorded(17) == 1  # in place of that of 8 rows
    assert recorded(9, 16, 24, 20) == 0
    assert recorded(1) == 1
    sizes = {draft.forward_pass.padded_rows(count) for count in range(1, 513)}
    assert len(sizes) == 18


# --- Drafts without a host in the loop


def propose(engine: Engine, lengths: tuple[int, ...], min_chance: float, rounds: int) -> list[list[Proposal]]:
    """Proposals of some rounds, in which every second draft token is accepted."""
    proposer, tokens = Proposer(engine), [random_tokens(3 + 5 * i, seed=i) for i in range(len(lengths))]
    cached, found = [0] * len(lengths), []
    for number in range(rounds):
        items = [
            ProposeItem(
                sequence_id=i, base_length=cached[i], token_ids=tuple(tokens[i][cached[i] :]),
                num_draft_tokens=length, max_length=100, min_chance=min_chance,
            )
            for i, length in enumerate(lengths)
        ]  # fmt: skip
        proposals = proposer.propose("a", number + 1, items)
        found.append(proposals)
        for i, proposal in enumerate(proposals):
            kept = proposal.draft_token_ids[: len(proposal.draft_token_ids) // 2]
            cached[i] = len(tokens[i]) + len(kept[:-1])
            tokens[i] = [*tokens[i], *kept, 7]
    return found


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("min_chance", [0.0, 0.02])
def test_drafts_are_the_same_without_a_host_in_the_loop(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool, min_chance: float
) -> None:
    folder = save_random(tmp_path, *VARIANTS["qwen3"])
    options = {"native": False, "cuda_graphs": cuda_graphs, "max_sequences": 4, "max_model_len": 128}
    lengths = (4, 0, 1, 6)
    alone = propose(load_engine(folder, exact=False, **options), lengths, min_chance, rounds=4)
    monkeypatch.setattr(Engine, "drafts_ahead", False)
    step_by_step = propose(load_engine(folder, exact=False, **options), lengths, min_chance, rounds=4)
    for ours, expected in zip(alone, step_by_step, strict=True):
        for one, other in zip(ours, expected, strict=True):
            assert one.draft_token_ids == other.draft_token_ids
            assert one.num_cached_tokens == other.num_cached_tokens
            assert one.confidences == pytest.approx(other.confidences)
