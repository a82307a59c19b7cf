"""The GPU's pass on a CPU: its attention by Triton's interpreter, its recorded passes by repeating them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interpreted_kernels import attend_by_kernels
from test_lean import VARIANTS, save_random
from tiny_models import load_engine, random_tokens, rows_that_differ, transformers_logits
from torch.nn.functional import scaled_dot_product_attention

from engine import forward
from engine.cache.spans import Span
from engine.passes import attention
from engine.passes.graphs import RecordedModel, Run
from engine.passes.kernels import SPLIT, attend_extents, splits_for
from engine.probes import exactness

pytest.importorskip("triton")

POSITIONS = [0, 1, 63, 64, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 100]


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_by_kernels(monkeypatch)


def attend_row_by_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    positions: torch.Tensor, columns: torch.Tensor, scaling: float, splits: int,
) -> torch.Tensor:  # fmt: skip
    """What `attend_extents` computes, for those to whom only its interface matters."""
    results, groups = [], query.shape[1] // len(keys)
    for row, (position, column) in enumerate(zip(positions.tolist(), columns.tolist(), strict=True)):
        extent = slice(column - position, column + 1)
        k, v = (cache[:, extent].repeat_interleave(groups, 0) for cache in (keys, values))
        results.append(scaled_dot_product_attention(query[row, :, None], k, v, scale=scaling)[:, 0])
    return torch.stack(results)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 2, 80), (4, 4, 16), (34, 2, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter knows no bfloat16
def test_rows_attend_from_their_own_extents_and_alone_with_the_same_bits(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, kv_heads, 4000, dim).to(dtype)
    query = torch.randn(len(POSITIONS), heads, dim).to(dtype)
    positions = torch.tensor(POSITIONS)
    origins = torch.tensor([7 + 300 * i for i in range(len(POSITIONS))])
    splits = splits_for(max(POSITIONS) + 1)
    together = attend_extents(query, keys, values, positions, origins + positions, dim**-0.5, splits)
    for row, (position, origin) in enumerate(zip(POSITIONS, origins.tolist(), strict=True)):
        extent = slice(origin, origin + position + 1)
        k, v = (cache[:, extent].repeat_interleave(heads // kv_heads, 0).float() for cache in (keys, values))
        expected = scaled_dot_product_attention(query[row, :, None].float(), k, v)[:, 0]
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(together[row].float(), expected, atol=tolerance, rtol=tolerance)
        one = slice(row, row + 1)
        column = (origins + positions)[one]
        alone = attend_extents(query[one], keys, values, positions[one], column, dim**-0.5, splits_for(position + 1))
        assert torch.equal(alone[0], together[row])


def test_few_numbers_of_splits_cover_all_lengths() -> None:
    lengths = [1, SPLIT, SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 1, 8 * SPLIT]
    assert [splits_for(length) for length in lengths] == [1, 1, 2, 2, 4, 8]


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("kv_layout", ["slots", "padded"])
def test_an_engine_of_kernels_has_the_librarys_logits_and_is_bitwise(tmp_path: Path, kv_layout: str) -> None:
    folder = save_random(tmp_path, *VARIANTS["qwen3"])
    kernels = load_engine(folder, native=False, max_sequences=3, max_model_len=26, kv_layout=kv_layout)
    assert not kernels.forward_pass.plans_attention
    assert kernels.bitwise
    tokens = random_tokens(20)
    together = kernels.forward([Span(2, 0, tokens, 20), Span(0, 0, tokens[:3], 1)])
    expected = transformers_logits(folder, tokens)
    torch.testing.assert_close(together, torch.cat([expected, expected[2:3]]), atol=2e-5, rtol=1e-4)


# --- Recorded passes


class Recorder:
    """Repeats a pass as a graph would: reading and writing the memory of the pass that was recorded."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        self.recorded += 1
        logits = run()

        def replay() -> None:
            self.replayed += 1
            logits.copy_(run())

        return replay, logits


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, kernels_on_cpu: None) -> Recorder:
    recorder = Recorder()
    for module in (attention, exactness):
        monkeypatch.setattr(module, "attend_extents", attend_row_by_row)
    monkeypatch.setattr(forward, "records_passes", lambda device, options: True)
    monkeypatch.setattr(forward, "CudaGraphs", lambda: recorder)
    return recorder


def test_a_recorded_engine_gives_the_same_bits(tmp_path: Path, recorder: Recorder) -> None:
    folder = save_random(tmp_path, *VARIANTS["qwen3"])
    recorded = load_engine(folder, native=False, max_sequences=6, max_model_len=128)
    assert isinstance(recorded.forward_pass, RecordedModel)
    assert recorded.bitwise
    assert rows_that_differ(recorded, lengths=(2, 9, 40), drafts=3) == 0
    assert recorder.replayed > 5 * recorder.recorded > 0


def test_logits_outlive_the_next_pass_of_their_shape(tmp_path: Path, recorder: Recorder) -> None:
    engine = load_engine(save_random(tmp_path, *VARIANTS["llama"]), native=False, max_sequences=2, max_model_len=64)
    engine.max_forward_tokens = 4
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
    assert "cannot be recorded, and are launched: operation not permitted" in caplog.text


def test_a_draft_has_few_shapes(tmp_path: Path, recorder: Recorder) -> None:
    folder = save_random(tmp_path, *VARIANTS["llama"])
    draft = load_engine(folder, exact=False, native=False, max_sequences=6, max_model_len=64)
    recorder.recorded = 0
    for rows in (1, 2, 3, 5, 1, 2, 3, 5):
        draft.forward([Span(slot, 0, [5], 1) for slot in range(rows)])
    assert recorder.recorded <= 1
