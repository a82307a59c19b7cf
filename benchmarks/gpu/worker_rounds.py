"""Times the parts of a round of a target worker that carries a draft, and compares its answers with plain decoding.

Rounds run in this process, without gRPC, one at a time. Drafts are right in about 70% of the tokens.
"""

import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

from benchmarks.gpu.engines import WARM_UPS
from benchmarks.gpu.events import Call, Recorder, medians
from benchmarks.gpu.exactness import check_all_equal
from benchmarks.gpu.folders import ACCEPTANCE, DRAFTS, make_models, num_generated_tokens
from benchmarks.gpu.part import Findings, Row, Settings
from draft_worker.proposer import Proposer
from specpool.engine.config.options import EngineOptions
from specpool.engine.passes.gpu.draft_loop import GpuDraftLoop
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import load_unproven_engine
from specpool.protocol.rounds import OwnDraftItem, Verdict, VerifyItem, VerifyRound
from target_worker.device_rounds import DeviceRounds
from target_worker.verifier import Verifier

CASE_SECONDS = 10
"""Minimum seconds left to start the rounds of a draft for a number of sequences."""
COORDINATOR = "benchmark"
WAYS = ("device", "host", "device, eager", "host, eager")
"""How rounds run: as a whole on the device or step by step, with or without CUDA graphs."""


@dataclass
class Answer:
    """A sequence, and what its rounds yielded."""

    token_ids: list[int]
    """The prompt and the generated tokens."""
    num_cached_tokens: int = 0
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The draft found by each round, by the number of tokens before it."""

    def take(self, verdict: Verdict) -> None:
        if verdict.own_draft is not None:
            self.drafts[len(self.token_ids)] = verdict.own_draft.draft_token_ids
        self.token_ids += verdict.token_ids
        self.num_cached_tokens = verdict.num_cached_tokens


class Worker:
    """Rounds of a target with a carried draft."""

    def __init__(self, settings: Settings, target: Engine, draft: Engine) -> None:
        self.target, self.draft, self.verifier = target, draft, Verifier(target, Proposer(draft))
        self.recorder, self._round_id = Recorder(settings.device), 0
        self.calls: list[Call] = [
            (target.forward_pass, "forward", "target"),
            (draft.forward_pass, "forward", "draft"),
            (GpuDraftLoop, "run_steps", "steps"),
        ]

    def generate(
        self, prompts: Sequence[Sequence[int]], rounds: int, own: OwnDraftItem | None
    ) -> tuple[list[Answer], list[Row]]:
        """Run a prefill and this many rounds. Return the answers, and the times of the rounds after warm-up."""
        answers = [Answer([*prompt]) for prompt in prompts]
        with self.recorder.recording(self.calls):
            times = [self._round(answers, own) for _ in range(1 + rounds)]
        self.verifier.release(COORDINATOR, None)
        return answers, times[1 + min(WARM_UPS, rounds - 1) :]

    @contextmanager
    def running(self, way: str) -> Iterator[None]:
        """Run rounds in one of `WAYS` within this context."""
        with ExitStack() as stack:
            if "host" in way:
                stack.enter_context(patch.object(DeviceRounds, "run", lambda *_: {}))
            if "eager" in way:
                stack.enter_context(self.target.forward_pass.eager())
                stack.enter_context(self.draft.forward_pass.eager())
            yield

    def _round(self, answers: Sequence[Answer], own: OwnDraftItem | None) -> Row:
        self._round_id += 1
        items = [
            VerifyItem(index, each.num_cached_tokens, tuple(each.token_ids[each.num_cached_tokens :]), own_draft=own)
            for index, each in enumerate(answers)
        ]
        asked = [VerifyRound(COORDINATOR, self._round_id, items)]
        before = self._device_ns
        (verdicts,), times = self.recorder.round(lambda: self.verifier.verify(asked))
        times["on_device"] = self._device_ns > before
        for answer, verdict in zip(answers, verdicts, strict=True):
            answer.take(verdict)
        return times

    @property
    def _device_ns(self) -> int:
        """Time spent on drafts in rounds that ran as a whole on the device."""
        return 0 if self.verifier.drafts is None else self.verifier.drafts.device_rounds.draft_ns


def measure_rounds(settings: Settings, findings: Findings) -> None:
    """Measure rounds with an EAGLE-3 head, and with a draft model."""
    folder = make_models(settings)
    target = load(settings, folder / "target", exact=True)
    findings.add(acceptance=ACCEPTANCE, num_draft_tokens=settings.sizes.num_draft_tokens, notes=target.notes)
    for name in DRAFTS:
        worker = Worker(settings, target, load(settings, folder / name, False, folder / "target"))
        findings.add(**{f"{name}_notes": worker.draft.notes})
        for batch in settings.sizes.batches:
            case = partial(add_rounds, findings, worker, settings, name, batch)
            findings.attempt(settings, f"{name}, {batch} sequences", CASE_SECONDS, case)
        del worker, case
        gc.collect()
    check_all_equal(findings)


def load(settings: Settings, model: Path, exact: bool, target: Path | None = None) -> Engine:
    """Load a model like a worker does, without its self-test."""
    rounds = settings.sizes.rounds * (1 + settings.sizes.num_draft_tokens)
    options = EngineOptions.model_validate({
        "model": str(model), "target_model": target and str(target), "device": settings.device,
        "dtype": settings.dtype, "max_sequences": max(settings.sizes.batches),
        "max_model_len": settings.sizes.lengths[0] + rounds + 64,
    })  # fmt: skip
    return load_unproven_engine(options, exact)


def add_rounds(findings: Findings, worker: Worker, settings: Settings, draft: str, batch: int) -> None:
    """Add a row for plain rounds, and one for each way to draft."""
    sizes, rng = settings.sizes, random.Random(batch)
    k, cached = sizes.num_draft_tokens, sizes.lengths[0]
    prompts = [[rng.randrange(num_generated_tokens(settings)) for _ in range(cached)] for _ in range(batch)]
    own = OwnDraftItem(k, k, worker.target.max_model_len)
    truth, _ = worker.generate(prompts, sizes.rounds * (1 + k), None)
    runs = {way: list[Row]() for way in ("plain", *WAYS)}
    answers = dict[str, list[Answer]]()
    for repeat in range(sizes.runs):
        runs["plain"] += worker.generate(prompts, sizes.rounds, None)[1]
        for way in WAYS:
            if repeat and "eager" in way:
                continue  # only its answers matter
            with worker.running(way):
                answers[way], times = worker.generate(prompts, sizes.rounds, own)
            runs[way] += times
            compare(findings, {"model": draft, "sequences": batch, "how": way}, answers[way], truth)
    plain_ms = 0.0
    for way, times in runs.items():
        row = medians(times)
        gained = [len(each.token_ids) - cached - 1 for each in answers.get(way, ())]
        per_round = sum(gained) / len(gained) / sizes.rounds if gained else 1.0
        speed = batch * per_round / row["reply_ms"] * 1000
        plain_ms = plain_ms or row["reply_ms"]
        findings.add_row("rounds", {
            "draft": draft, "sequences": batch, "cached": cached, "way": way, "tokens_a_round": round(per_round, 2),
            "tokens_per_s": round(speed, 1), "over_plain": round(speed * plain_ms / 1000 / batch, 3),
            "same_drafts": same_share(answers, way), **row,
        })  # fmt: skip
        if settings.device != "cpu" and row["on_device"] != ("device" in way):
            raise RuntimeError(f"{way}: rounds ran {'on the device' if row['on_device'] else 'step by step'}")


def same_share(answers: Mapping[str, Sequence[Answer]], way: str) -> float | None:
    """Share of drafts equal to those of the first way. A draft's bits may depend on the shape of a pass."""
    if way not in answers:
        return None
    first = next(iter(answers.values()))
    same = [
        own.drafts[length] == other.drafts[length]
        for own, other in zip(answers[way], first, strict=True)
        for length in own.drafts.keys() & other.drafts.keys()
    ]
    return round(sum(same) / len(same), 4)


def compare(findings: Findings, facts: Row, answers: Sequence[Answer], truth: Sequence[Answer]) -> None:
    """Add a row: how many answers differ from those of plain decoding."""
    different = sum(
        own.token_ids != plain.token_ids[: len(own.token_ids)] for own, plain in zip(answers, truth, strict=True)
    )
    facts = {**facts, "what": "answers", "rows": len(answers)}
    findings.add_row("exactness", {**facts, "different": different, "equal": not different})
