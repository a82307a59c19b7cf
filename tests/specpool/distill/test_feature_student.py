"""A draft that reads hidden states: its training computes what the draft worker computes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import load_engine
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specpool.distill.evaluate import EvaluateSettings, evaluate, read_prompts
from specpool.distill.examples import Batch, Dialogues, Example, TargetStates, batches
from specpool.distill.feature_student import FeatureStudent
from specpool.distill.main import distill
from specpool.distill.predictions import target_states
from specpool.distill.questions import ChatTemplate, Limits, Questions
from specpool.distill.settings import DistillSettings
from specpool.distill.student import Student, check_weights
from specpool.distill.training import agreement, distillation_loss, drop_states
from specpool.distill.writer import Writer
from specpool.engine.cache.spans import Span
from specpool.engine.models.draft_folder import save_draft
from specpool.engine.models.draft_weights import load_trained, save_compact
from specpool.engine.run.engine import Engine

LAYERS = [1, 3]


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[Path, Path]) -> Engine:
    return load_engine(tiny_pair[0], exact=False, max_sequences=6)


@pytest.fixture(scope="module")
def dialogues(engine: Engine, tiny_pair: tuple[Path, Path]) -> Dialogues:
    template = ChatTemplate.of(
        AutoTokenizer.from_pretrained(tiny_pair[0]), frozenset(engine.loaded.tokenizer.eos_token_ids)
    )
    questions = Questions(template, 1, Limits(max_question=400, max_answer=20))
    return Dialogues.of([example for _, example in Writer(engine, questions).write(range(12), lag=64)])


@pytest.fixture(scope="module")
def target(tiny_pair: tuple[Path, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def examples(target: Any, dialogues: Dialogues) -> list[Example]:
    return TargetStates(target, LAYERS).examples(dialogues.examples())


def student_of(target: Any) -> FeatureStudent:
    torch.manual_seed(0)
    return FeatureStudent(target, [2], torch.arange(257), LAYERS)


def test_states_are_those_of_the_worker(target: Any, examples: list[Example], engine: Engine) -> None:
    batch = TargetStates(target, LAYERS).with_states(next(batches(examples, 10**6, random.Random(0))))
    assert batch.states is not None
    of_batch = {tuple(tokens.tolist()): states for tokens, states in zip(batch.token_ids, batch.states, strict=True)}
    for example in examples:
        tokens = example.token_ids.tolist()
        served = target_states(engine, tokens, tuple(LAYERS))
        assert example.states is not None
        torch.testing.assert_close(example.states.float(), served, rtol=0.05, atol=0.05)
        padded = (*tokens, *[0] * (batch.token_ids.shape[1] - len(tokens)))
        torch.testing.assert_close(of_batch[padded][: len(tokens)], example.states.float(), rtol=0.02, atol=0.02)


def test_states_in_bfloat16_are_close(target: Any, examples: list[Example]) -> None:
    for rounded, example in zip(
        TargetStates(target, LAYERS, in_bfloat16=True).examples(examples), examples, strict=True
    ):
        assert rounded.states is not None
        assert example.states is not None
        error = (rounded.states.float() - example.states.float()).norm() / example.states.float().norm()
        assert error < 0.02


def test_unrolled_steps_equal_those_of_a_draft_worker(
    target: Any, examples: list[Example], tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    student, example = student_of(target), examples[0]
    with torch.no_grad():
        student.fc.normal_(std=0.1)
        student.project.normal_(std=0.1)
    trained = student.trained()
    check_weights(trained, AutoConfig.from_pretrained(tiny_pair[0]))
    save_draft(tmp_path, str(tiny_pair[0]), trained)
    draft = load_engine(tmp_path, exact=False)
    tokens, states = example.token_ids[:12], example.states
    assert states is not None
    every = torch.ones(1, 12, dtype=torch.bool)
    with torch.inference_mode():
        steps = student.unroll(Batch(tokens[None], every, every, tokens, tokens, states[None, :12].float()), 4)
    for first in range(1, 9):
        span = Span(0, 0, tokens[:first].tolist(), 1, states=states[: first - 1].float())
        for depth, step in enumerate(steps):
            logits = draft.forward([span])
            torch.testing.assert_close(logits[0], step.logits[first - 1 + depth], rtol=1e-2, atol=1e-2)
            assert draft.own_states is not None
            own = {0: draft.own_states[0]}
            span = Span(0, span.end, [int(tokens[span.end])], 1, own_states=own)


def test_student_of_a_causal_draft_equals_it(target: Any, examples: list[Example], tmp_path: Path) -> None:
    causal, student = (
        Student(target, [0, 2], torch.arange(257)),
        FeatureStudent(target, [0, 2], torch.arange(257), LAYERS),
    )
    save_compact(tmp_path / "causal.safetensors", causal.trained())
    trained = load_trained(tmp_path / "causal.safetensors")
    causal.learn(trained)
    student.learn(trained)
    batch = next(batches(examples, 10**6, random.Random(0)))
    with torch.inference_mode():
        (expected,) = causal.unroll(batch)
        before = student.unroll(batch, 3)
    student.set_units(examples)
    assert (student.fc_units < 1).any()
    with torch.inference_mode():
        for step in (*before, *student.unroll(batch, 3)):
            torch.testing.assert_close(step.logits, expected.logits, rtol=1e-3, atol=1e-3)


def test_units_change_no_weight(target: Any, examples: list[Example]) -> None:
    student = student_of(target)
    student.fit_input(target, 2, examples)
    before = student.trained()
    student.set_units(examples)
    assert not torch.equal(student.project_units, torch.ones_like(student.project_units))
    for name, weight in student.trained().items():
        torch.testing.assert_close(weight, before[name])


def test_inputs_are_stored_in_blocks(target: Any, examples: list[Example], tmp_path: Path) -> None:
    """The columns of states are thousands of times smaller than those of embeddings."""
    student = student_of(target)
    with torch.no_grad():
        student.fc.normal_()
        student.fc[:, :96] *= 1e-4
    save_compact(tmp_path / "draft.safetensors", student.trained())
    stored = load_trained(tmp_path / "draft.safetensors")["fc"]
    torch.testing.assert_close(stored[:, :96], student.fc[:, :96].detach(), rtol=0.02, atol=2e-6)
    torch.testing.assert_close(stored[:, 96:], student.fc[:, 96:].detach(), rtol=0.02, atol=2e-2)


def test_regression_predicts_the_input_of_the_layer(target: Any, examples: list[Example]) -> None:
    student = student_of(target)
    before = distillation_loss(student, next(batches(examples, 10**6, random.Random(0))))
    student.fit_input(target, 2, examples)
    after = distillation_loss(student, next(batches(examples, 10**6, random.Random(0))))
    assert after < before


@pytest.mark.slow
def test_training_lowers_the_loss_of_all_steps(target: Any, examples: list[Example]) -> None:
    student = student_of(target)
    student.fit_input(target, 2, examples)
    weights = [weight for weight in student.parameters() if weight.requires_grad]
    optimizer, losses = torch.optim.AdamW(weights, lr=3e-3), []
    before = agreement(student, examples, 3)
    for epoch in range(9):
        for batch in batches(examples, 1000, random.Random(epoch)):
            loss = distillation_loss(student, drop_states(batch, random.Random(epoch)), 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    after = agreement(student, examples, 3)
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])
    assert [sum(map(sum, now)) > sum(map(sum, old)) for old, now in zip(before, after, strict=True)] == [True] * 3


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_states_are_dropped_from_the_start(examples: list[Example], share: float) -> None:
    batch = next(batches(examples, 10**6, random.Random(0)))
    dropped = drop_states(batch, random.Random(3), share)
    assert batch.states is not None
    assert dropped.states is not None
    kept = (dropped.states == batch.states).all(-1)
    assert kept.all() == (share == 0)
    assert (kept.int().diff(dim=1) >= 0).all()


@pytest.mark.slow
def test_command_trains_and_evaluates_a_feature_draft(
    tiny_pair: tuple[Path, Path], dialogues: Dialogues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    for number in range(6):  # 72 dialogues
        dialogues.save(output / f"dialogues-{number:05}.safetensors")
    monkeypatch.setattr("specpool.distill.preparation.DIALOGUES_PER_FILE", 12)
    settings = DistillSettings(
        target=str(tiny_pair[0]), output=output, kind="feature", dialogues=72, held_out=8, output_tokens=257,
        epochs=0.5, batch_tokens=256, precision="bfloat16",
    )  # fmt: skip
    distill(settings)
    config = json.loads((output / "model" / "config.json").read_text())
    assert config["specpool_features"] == {"layers": [1, 2, 3], "width": 3 * 96}
    weights = (output / "draft.safetensors").read_bytes()
    distill(settings)  # resumes at the end
    assert (output / "draft.safetensors").read_bytes() == weights
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    evaluating = EvaluateSettings(prompts=prompts, max_sequences=2, max_model_len=512)
    *_, total = evaluate(evaluating, read_prompts(prompts), str(tiny_pair[0]), str(output / "model"))["categories"]
    assert 1 <= total["k=1"] <= total["k=5"] <= 6


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"feature_layers": "1,4"}, "feature_layers: must be from 1 to 3, the number of the target's layers"),
        ({"initial": "INITIAL", "kind": "causal"}, "draft.safetensors is a feature draft, which needs --kind feature"),
    ],
)
def test_wrong_layers_and_kinds_are_refused_in_one_line(
    tiny_pair: tuple[Path, Path], target: Any, tmp_path: Path, options: dict[str, str],
    reason: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    save_compact(tmp_path / "draft.safetensors", student_of(target).trained())
    chosen: dict[str, Any] = {"kind": "feature", **options}
    if "initial" in options:
        chosen["initial"] = tmp_path / "draft.safetensors"
    with pytest.raises(SystemExit) as error:
        distill(DistillSettings(target=str(tiny_pair[0]), output=tmp_path / "output", **chosen))
    assert error.value.code == 2
    assert reason in capsys.readouterr().err
