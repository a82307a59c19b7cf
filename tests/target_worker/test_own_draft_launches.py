"""Kernel launches of a GPU in a round with own drafts, and waits of the host, counted on a CPU."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_drafts import save_pair_draft
from interpreted_kernels import FakeGraphs, imitate_graphs
from own_drafts import Generation, Rounds
from tiny_models import load_engine, random_tokens, save_model, small_config
from torch.utils._python_dispatch import TorchDispatchMode

from draft_worker.proposer import Proposer
from specpool.engine.passes.gpu import gemm
from specpool.engine.passes.gpu.graphs import Run
from specpool.engine.run import device_round
from specpool.protocol.rounds import OwnDraftItem
from target_worker.verifier import Verifier

pytest.importorskip("triton")

K = 4


class Launches(TorchDispatchMode):
    """Counts operations and GEMMs by name. Views and empty tensors launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.is_paused = Counter[str](), False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.is_paused and not function.is_view and "empty" not in function.name():
            self.counts[function.name()] += 1
        return function(*args, **kwargs or {})

    @contextmanager
    def as_one(self, name: str) -> Iterator[None]:
        """Count all operations in this context as one launch."""
        if self.is_paused:
            yield
            return
        self.counts[name] += 1
        self.is_paused = True
        yield
        self.is_paused = False

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts as one launch."""

        def run(*args: Any) -> Any:
            with self.as_one(name):
                return function(*args)

        return run


class CountedGraphs(FakeGraphs):
    """A replay is one launch."""

    launches, num_captured = Launches(), 0

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        CountedGraphs.num_captured += 1
        replay, result = super().__call__(run)
        return self.launches.counted("replay", replay), result


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A target, and a draft that reads its states. Their passes are captured."""
    imitate_graphs(monkeypatch, 64, CountedGraphs())
    counted = CountedGraphs.launches.counted
    for module, name in ((gemm, "split_k_gemm"), (device_round, "accept")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, counted("wait", getattr(torch.Tensor, name)))
    target = save_model(tmp_path / "target", small_config("llama", num_hidden_layers=3))
    causal = save_model(tmp_path / "causal", small_config("llama", num_hidden_layers=1))
    return target, save_pair_draft(tmp_path / "draft", target, causal, (1, 2))


def test_launches_do_not_grow_with_the_sequences(folders: tuple[Path, Path]) -> None:
    target, draft = (
        load_engine(folder, exact=False, native=False, max_sequences=8, max_model_len=128) for folder in folders
    )
    captured, counts = CountedGraphs.num_captured, []
    for number in (2, 8):
        rounds = Rounds(Verifier(target, Proposer(draft)))
        generations = [Generation(i, tuple(random_tokens(9, seed=i))) for i in range(number)]
        for _ in range(3):
            CountedGraphs.launches.counts.clear()
            with CountedGraphs.launches:
                rounds.send([(each, each.item(OwnDraftItem(K, K))) for each in generations])
        assert all(each.num_verified == 2 * K for each in generations)
        counts.append(CountedGraphs.launches.counts.copy())
        rounds.verifier.release("c", None)
    assert counts[0] == counts[1]
    assert counts[0]["replay"] == 4, "both passes, and graphs of 2 steps and of 1"
    assert counts[0]["accept"] == counts[0]["wait"] == 1
    assert CountedGraphs.num_captured == captured > 0, "nothing is captured while serving"
