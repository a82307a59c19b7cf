"""Runs passes, draft loops and rounds of Qwen3-8B on the meta device, for a recorder of launches."""

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.gpu.launches import Launch, Recorder, TorchKernels, Work
from benchmarks.kernels import batch_of, model_of
from benchmarks.shapes import SHAPES
from specpool.engine.passes.gpu.choice import REMAINING, choose
from specpool.engine.passes.gpu.gemm import Gemm
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.sampling.head import Head

# Rows from which the engine chose cuBLAS on an H200, by outputs and inputs of the weight.
CUBLAS_ROWS = {
    (151_936, 4096): 128, (24_576, 4096): 128, (4096, 12_288): 128, (6144, 4096): 320, (4096, 4096): 320,
    (151_936, 1024): 40,
}  # fmt: skip
# Layers whose states EAGLE-3 reads, and the outputs of its head.
STATE_LAYERS, EAGLE_OUTPUTS = 3, 32_000
STEP = re.compile(r"(?P<kind>draft|eagle|round)?(?P<sequences>[1-9]\d*)(x(?P<tokens>[1-9]\d*))?")


@dataclass(frozen=True)
class Step:
    """A pass of the target, a draft loop of Qwen3-0.6B or of an EAGLE-3 head, or a round with such a head."""

    name: str
    kind: str  # "" (a pass), draft, eagle or round
    sequences: int
    tokens: int  # of each sequence: new tokens of a pass, otherwise draft tokens


def step_of(name: str) -> Step:
    """Argument type: a step, such as 8, 8x5 or eagle8x4."""
    if (match := STEP.fullmatch(name)) is None:
        raise ArgumentTypeError(f"{name!r} is not a step such as 8, 8x5, draft8x4, eagle8x4 or round8x4")
    return Step(name, match["kind"] or "", int(match["sequences"]), int(match["tokens"] or 1))


class Rounds:
    """The models of all steps. Use it while the recorder compiles."""

    def __init__(self, recorder: Recorder, cached: int) -> None:
        """`cached`: cached positions of each sequence."""
        self._recorder, self._cached = recorder, cached
        self._target, self._draft = (
            model_of(SHAPES[name], torch.bfloat16, SHAPES[name]["num_hidden_layers"])
            for name in ("qwen3-8b", "qwen3-0.6b")
        )
        self._eagle = _eagle_head()
        for model in (self._target, self._draft, self._eagle):
            for gemm in model.gemms():
                gemm.cublas_rows = CUBLAS_ROWS.get((gemm.out_features, gemm.in_features))

    @torch.inference_mode()
    def launches(self, step: Step) -> list[Launch]:
        """All launches of a step."""
        self._recorder.launches = []
        work = Work(step.sequences, step.tokens + (step.kind in ("eagle", "round")), self._cached)
        if step.kind in ("", "round"):
            logits = self._forward(self._target, work, work.tokens)
            if step.kind == "round":
                choose(logits, Head(logits.shape[1]))
                self._recorder.launches.append(Launch("accept", (work.sequences, 1, 1), {}, work))
        if step.kind in ("eagle", "round"):
            self._run_loop(self._eagle, work, step.tokens)
        if step.kind == "draft":
            self._run_loop(self._draft, Work(step.sequences, 1, self._cached), step.tokens)
        return self._recorder.launches

    def _forward(self, model: GpuModel, work: Work, num_logits: int) -> torch.Tensor:
        """A pass with this number of rows of logits of each sequence."""
        self._recorder.work = work
        batch = batch_of(model, [work.tokens] * work.sequences, work.cached, [num_logits] * work.sequences)
        with TorchKernels(self._recorder):
            if model.projection is not None and work.tokens > 1:
                width = model.projection.in_features
                model.project(torch.empty(batch.rows, width, dtype=model.compute_dtype, device="meta"))
            logits: torch.Tensor = model(batch)
        return logits

    def _run_loop(self, model: GpuModel, work: Work, tokens: int) -> None:
        """A pass over the new tokens of each sequence, then steps of one token."""
        for _ in range(tokens):
            logits = self._forward(model, work, 1)
            numbers = torch.empty(REMAINING + 1, len(logits), dtype=torch.int64, device="meta")
            choose(logits, Head(logits.shape[1]), numbers)
            work = Work(work.sequences, 1, work.cached + work.tokens)


class _Joined(nn.Module):
    """A GEMM of the embedding and the state of each token."""

    def __init__(self, gemm: Gemm) -> None:
        super().__init__()
        self.gemm = gemm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = self.gemm(torch.cat([x, x], -1))
        return joined


def _eagle_head() -> GpuModel:
    """The kernels of an EAGLE-3 head of Qwen3-8B."""
    shape = SHAPES["qwen3-8b"]
    model, hidden = model_of(shape, torch.bfloat16), shape["hidden_size"]

    def gemm(outputs: int, inputs: int, split: bool = True) -> Gemm:
        return Gemm(torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta"), split)

    layer = model.layers[0]
    layer.qkv = _Joined(gemm(layer.qkv.out_features, 2 * hidden))
    model.head, model.projection = gemm(EAGLE_OUTPUTS, hidden, split=False), gemm(hidden, STATE_LAYERS * hidden)
    return model
