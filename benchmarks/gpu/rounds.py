"""Runs passes, draft loops and rounds of a target on the meta device, for a recorder of launches."""

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass

import torch

from benchmarks.gpu.launches import Launch, Recorder, TorchKernels, Work
from benchmarks.kernels import accept_drafts, draft, model_of, run
from benchmarks.shapes import HEAD_SHAPES, HYBRID_SHAPES, LATENT_SHAPES, SHAPES
from specpool.engine.passes.gpu.choice import choose
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.sampling.head import Head

# Rows from which the engine chose cuBLAS on an H200, by outputs and inputs of the weight.
CUBLAS_ROWS = {
    (151_936, 4096): 128, (24_576, 4096): 128, (4096, 12_288): 128, (6144, 4096): 320, (4096, 4096): 320,
    (151_936, 1024): 40,
}  # fmt: skip
TARGET, DRAFT, EAGLE = "qwen3-8b", "qwen3-0.6b", "qwen3-8b eagle3"
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

    def __init__(self, recorder: Recorder, cached: int, target: str = TARGET) -> None:
        """`cached`: cached positions of each sequence. Other targets than `TARGET` have no drafts."""
        self._recorder, self._cached, self._target = recorder, cached, target
        self._models = {
            name: model_of(shape, torch.bfloat16, shape["num_hidden_layers"])
            for name, shape in (SHAPES | HYBRID_SHAPES | LATENT_SHAPES | HEAD_SHAPES).items()
            if name in ((TARGET, DRAFT, EAGLE) if target == TARGET else (target,))
        }
        for model in self._models.values():
            for gemm in model.gemms():
                gemm.cublas_rows = CUBLAS_ROWS.get((gemm.out_features, gemm.in_features))

    @property
    def target(self) -> GpuModel:
        """The target's pass."""
        return self._models[self._target]

    @torch.inference_mode()
    def launches(self, step: Step) -> list[Launch]:
        """All launches of a step."""
        self._recorder.launches = []
        count, k = step.sequences, step.tokens
        verified = Work(count, k + (step.kind in ("eagle", "round")), self._cached)
        if step.kind in ("", "round"):
            self._run(self._target, verified)
        if step.kind == "round":
            self._choose(self._target, verified)
            accept_drafts(self._models[self._target])
        if step.kind in ("eagle", "round"):
            self._draft(EAGLE, verified, k)
        if step.kind == "draft":
            self._draft(DRAFT, Work(count, 1, self._cached), k)
        return self._recorder.launches

    def _run(self, name: str, work: Work) -> None:
        self._recorder.work = work
        with TorchKernels(self._recorder):
            run(self._models[name], [work.tokens] * work.sequences, work.cached)

    def _choose(self, name: str, work: Work) -> None:
        outputs = self._models[name].head.out_features
        choose(torch.empty(work.sequences * work.tokens, outputs, dtype=torch.bfloat16, device="meta"), Head(outputs))

    def _draft(self, name: str, work: Work, tokens: int) -> None:
        """A pass over the new tokens of each sequence, then steps of one token."""
        self._run(name, work)
        self._recorder.work = Work(work.sequences, 1, work.cached + work.tokens)
        self._choose(name, self._recorder.work)
        model = self._models[name]
        with TorchKernels(self._recorder):
            draft(model, model.padded_rows(work.sequences), self._recorder.work.cached, tokens - 1)
