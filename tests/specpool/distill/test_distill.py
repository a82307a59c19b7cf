"""Dialogues of a target, and a student that learns from them, with tiny random models."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import load_engine, save_model, save_output_head
from tiny_pair import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specpool.distill import corpus, training
from specpool.distill.corpus import TASKS, TOP, ChatTemplate, Dialogues, Writer, packed
from specpool.distill.evaluate import EvaluateSettings, evaluate, read_chats
from specpool.distill.main import DistillSettings, train
from specpool.distill.replay import acceptance_by_position, mean_acceptance_length
from specpool.distill.student import Student, check_weights, most_frequent
from specpool.distill.training import Checkpoint, Example, agreement, batches, examples_of, loss_of
from specpool.engine.cache.spans import Span
from specpool.engine.models.draft_folder import save_draft
from specpool.engine.models.draft_weights import load_compact, load_trained, save_compact
from specpool.engine.run.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[Path, Path]) -> Engine:
    return load_engine(tiny_pair[0], exact=False, max_sequences=6)


@pytest.fixture(scope="module")
def template(tiny_pair: tuple[Path, Path], engine: Engine) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair[0])
    return ChatTemplate.of(tokenizer, frozenset(engine.loaded.tokenizer.eos_token_ids))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow long questions and truncate answers, because random models rarely end a turn."""
    monkeypatch.setattr(corpus, "MAX_ANSWER", 20)
    monkeypatch.setattr(corpus, "MAX_QUESTION", 400)


@pytest.fixture(scope="module")
def dialogues(engine: Engine, template: ChatTemplate) -> Dialogues:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpus, "MAX_ANSWER", 20)
        patched.setattr(corpus, "MAX_QUESTION", 400)
        return packed(list(Writer(engine, template, seed=1).write(12)))


def target_of(tiny_pair: tuple[Path, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32)


# --- Dialogues


def test_answers_are_greedy(tiny_pair: tuple[Path, Path], dialogues: Dialogues, template: ChatTemplate) -> None:
    target = target_of(tiny_pair)
    examples = examples_of(dialogues)
    assert len(examples) == 12
    for example in examples:
        tokens, start = example.token_ids, example.answer_start
        assert tuple(tokens[: len(template.before_question)].tolist()) == template.before_question
        assert tuple(tokens[start - len(template.before_answer) : start].tolist()) == template.before_answer
        assert 0 < len(tokens) - start <= 20
        with torch.inference_mode():
            logits = target(tokens[None]).logits[0, start - 1 : -1]
        assert torch.equal(logits.argmax(-1), tokens[start:])
        expected, ids = logits.log_softmax(-1).topk(TOP)
        assert torch.equal(example.top_ids[:, 0], tokens[start:])
        assert (example.top_ids == ids).float().mean() > 0.95  # near-ties may swap
        torch.testing.assert_close(example.top_logprobs, expected, atol=5e-3, rtol=5e-3)


def test_a_target_with_a_partial_output_head(tmp_path: Path) -> None:
    folder, kept = save_model(tmp_path, tiny_config()), [3, 200, 7, 255, 90, *range(100, 190)]
    save_output_head(folder, kept)
    engine = load_engine(folder, exact=False, max_sequences=2)
    template = ChatTemplate.of(AutoTokenizer.from_pretrained(folder), frozenset())
    (written,) = islice(Writer(engine, template, seed=0).answer([list(b"hello")]), 1)
    logits = engine.over_vocabulary(engine.forward([Span(0, 0, written.token_ids[:-1], len(written.top_ids))]))
    assert logits.argmax(-1).tolist() == written.token_ids[5:]
    assert set(written.token_ids[5:]) <= set(kept)


def test_dialogues_survive_a_file(tmp_path: Path, dialogues: Dialogues) -> None:
    dialogues.save(tmp_path / "some.safetensors")
    again = Dialogues.load(tmp_path / "some.safetensors")
    assert all(torch.equal(value, getattr(again, name)) for name, value in vars(dialogues).items())
    assert [path.name for path in tmp_path.iterdir()] == ["some.safetensors"]


@pytest.mark.usefixtures("short")
def test_dialogues_depend_on_the_seed_only(engine: Engine, template: ChatTemplate) -> None:
    def written(seed: int) -> list[int]:
        return packed(list(Writer(engine, template, seed).write(4))).token_ids.tolist()

    assert written(5) == written(5) != written(6)


@pytest.mark.usefixtures("short")
def test_some_questions_are_tasks_on_earlier_answers(engine: Engine, template: ChatTemplate) -> None:
    examples = examples_of(packed(list(Writer(engine, template, seed=3).write(60))))
    tasks = [template.encode(f"{task}\n\n") for task in TASKS]
    answers: list[list[int]] = []
    about = 0
    for example in examples:
        tokens, start = example.token_ids.tolist(), example.answer_start
        question = tokens[len(template.before_question) : start - len(template.before_answer)]
        about += any(question == task + answer for task in tasks for answer in answers)
        answers.append([token for token in tokens[start:] if token not in template.ends])
    assert 5 <= about <= 30


# --- Training


def student_of(tiny_pair: tuple[Path, Path], kept: torch.Tensor | None = None) -> Student:
    torch.manual_seed(0)
    return Student(target_of(tiny_pair), [0, 2], torch.arange(257) if kept is None else kept)


def test_a_complete_student_equals_its_target(tiny_pair: tuple[Path, Path], dialogues: Dialogues) -> None:
    student = Student(target_of(tiny_pair), [0, 1, 2], torch.arange(257))
    examples = examples_of(dialogues)
    assert all(all(answer) for answer in agreement(student, examples))
    assert mean_acceptance_length(agreement(student, examples), 3) > 3


def test_training_lowers_the_loss_and_freezes_embeddings(tiny_pair: tuple[Path, Path], dialogues: Dialogues) -> None:
    student, examples = student_of(tiny_pair), examples_of(dialogues)
    embeddings = student.body.embed_tokens.weight.clone()
    weights = [weight for weight in student.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    losses = []
    for epoch in range(20):
        for batch in batches(examples, 1000, random.Random(epoch)):
            loss = loss_of(student, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    assert torch.equal(student.body.embed_tokens.weight, embeddings)


def test_tokens_outside_the_output_head_never_agree(tiny_pair: tuple[Path, Path], dialogues: Dialogues) -> None:
    examples = examples_of(dialogues)
    chosen = torch.cat([example.top_ids[:, 0] for example in examples])
    kept = torch.tensor([token for token in range(257) if token != int(chosen[0])])
    student = student_of(tiny_pair, kept)
    (batch,) = batches(examples, 10**6, random.Random(0))
    assert torch.isfinite(loss_of(student, batch))
    agreed = torch.tensor([one for answer in agreement(student, examples) for one in answer])
    assert not agreed[chosen == chosen[0]].any()


@pytest.mark.slow
def test_a_draft_worker_can_load_a_trained_draft(
    tmp_path: Path, tiny_pair: tuple[Path, Path], dialogues: Dialogues
) -> None:
    kept = torch.arange(0, 257, 2)
    student = student_of(tiny_pair, kept)
    save_compact(tmp_path / "draft.safetensors", student.trained())
    save_draft(tmp_path / "model", str(tiny_pair[0]), load_compact(tmp_path / "draft.safetensors"))
    trained = load_trained(tmp_path / "draft.safetensors")
    assert not any("embed" in name for name in trained)
    assert torch.equal(trained["output_ids"], kept)
    check_weights(trained, AutoConfig.from_pretrained(tiny_pair[0]))
    student.learn(trained)
    draft = load_engine(tmp_path / "model", exact=False)
    target = load_engine(tiny_pair[0], exact=False)
    assert draft.loaded.tokenizer.fingerprint == target.loaded.tokenizer.fingerprint
    tokens = examples_of(dialogues)[0].token_ids
    with torch.inference_mode():
        expected = student(tokens[None], torch.ones(1, len(tokens)), torch.ones(1, len(tokens), dtype=torch.bool))
    logits = draft.forward([Span(0, 0, tokens.tolist(), len(tokens))])
    torch.testing.assert_close(logits, expected, atol=0.02, rtol=0.02)  # embeddings in bfloat16


def test_a_draft_is_trained_and_evaluated_by_category(
    tmp_path: Path, tiny_pair: tuple[Path, Path], dialogues: Dialogues, capsys: pytest.CaptureFixture[str]
) -> None:
    target, output = str(tiny_pair[0]), tmp_path / "output"
    output.mkdir()
    dialogues.save(output / "dialogues-0000.safetensors")
    settings = DistillSettings(output=output, held_out=8, output_tokens=256, epochs=0.5, batch_tokens=64)
    train(settings, target, [0, 2])
    assert f"specpool up --target {target} --draft {output / 'model'}\n" in capsys.readouterr().out
    lines: list[dict[str, Any]] = [
        {"question_id": 1, "category": "long", "turns": ["x" * 400]},
        *({"question_id": 2, "category": "letters", "turns": [letter, "more"]} for letter in "abc"),
        {"id": "d", "messages": [{"role": "user", "content": "d"}]},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)))
    evaluating = EvaluateSettings(prompts=prompts, max_sequences=2, max_model_len=512)
    result = evaluate(evaluating, read_chats(prompts), target, str(output / "model"))
    assert result["left_out"] == 1
    assert [(row["category"], row["answers"]) for row in result["categories"]] == [
        ("letters", 3),
        ("none", 1),
        ("all", 4),
    ]
    assert all(1 <= row["k=1"] <= row["k=5"] <= 6 for row in result["categories"])
    *_, itself = evaluate(evaluating, read_chats(prompts), target, target)["categories"]
    assert (itself["agreement"], itself["k=1"]) == (1, pytest.approx(2, abs=0.01))


def test_training_resumes_from_a_checkpoint(tmp_path: Path, tiny_pair: tuple[Path, Path], dialogues: Dialogues) -> None:
    def steps(student: Student, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
        for number in range(first, first + count):
            (batch,) = batches(examples_of(dialogues), 10**6, random.Random(number))
            optimizer.zero_grad()
            loss_of(student, batch).backward()
            optimizer.step()

    def begun() -> tuple[Student, torch.optim.Optimizer]:
        student = student_of(tiny_pair)
        return student, torch.optim.AdamW([w for w in student.parameters() if w.requires_grad], lr=1e-3)

    through, optimizer = begun()
    steps(through, optimizer, 0, 6)
    checkpoint = Checkpoint(tmp_path / "checkpoint.pt", {})
    before, optimizer = begun()
    assert checkpoint.load(before, optimizer) == 0
    steps(before, optimizer, 0, 3)
    checkpoint.save(before, optimizer, 3)
    after, optimizer = begun()
    assert checkpoint.load(after, optimizer) == 3
    steps(after, optimizer, 3, 3)
    for one, other in zip(through.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_checkpoint_restores_the_output_tokens(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    """Other dialogues would select other tokens."""
    checkpoint = Checkpoint(tmp_path / "checkpoint.pt", {"layers": [0, 2]})
    before, after = student_of(tiny_pair, torch.arange(100)), student_of(tiny_pair, torch.arange(50, 150))
    checkpoint.save(before, torch.optim.AdamW([before.head]), 7)
    assert checkpoint.load(after, torch.optim.AdamW([after.head])) == 7
    assert torch.equal(after.output_ids, before.output_ids)
    assert torch.equal(after.row_of, before.row_of)


def test_a_checkpoint_of_another_draft_is_refused(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint.pt", {"layers": [0, 2]})
    checkpoint.check()  # there is none
    student = student_of(tiny_pair)
    checkpoint.save(student, torch.optim.AdamW([student.head]), 1)
    checkpoint.check()
    for began, name in (({"layers": [0, 1]}, "layers"), ({"initial": "draft"}, "initial")):
        with pytest.raises(ValueError, match=f"another draft.*{name} was"):
            Checkpoint(tmp_path / "checkpoint.pt", began).check()


lengths = st.lists(st.tuples(st.integers(2, 40), st.integers(1, 20)), min_size=1, max_size=30)


@given(lengths=lengths, tokens=st.integers(1, 200), seed=st.integers(0, 5))
def test_batches_hold_every_example_once(lengths: list[tuple[int, int]], tokens: int, seed: int) -> None:
    examples = []
    for number, (before, answer) in enumerate(lengths):
        top = torch.full((answer, TOP), number)
        examples.append(Example(torch.full((before + answer,), number), before, top, top.float()))
    found = []
    for batch in batches(examples, tokens, random.Random(seed)):
        assert batch.token_ids.numel() <= tokens or len(batch.token_ids) == 1
        rows = batch.token_ids[batch.chosen]
        assert torch.equal(rows, batch.top_ids[:, 0])  # candidates stay with their row
        for row, mask, chosen in zip(batch.token_ids, batch.attention_mask, batch.chosen, strict=True):
            before, answer = lengths[int(row[0])]
            assert mask.sum() == before + answer
            assert chosen.nonzero().flatten().tolist() == list(range(before - 1, before + answer - 1))
            found.append(int(row[0]))
    assert sorted(found) == list(range(len(lengths)))


@given(answers=st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=5), k=st.integers(0, 6))
def test_the_mean_acceptance_length_is_between_one_and_k_plus_one(answers: list[list[bool]], k: int) -> None:
    assert 1 <= mean_acceptance_length(answers, k) <= k + 1
    assert mean_acceptance_length([[True] * 60], k) == k + 1
    assert mean_acceptance_length([[False] * 60], k) == 1
    by_position = acceptance_by_position(answers, k)
    assert by_position == sorted(by_position, reverse=True)
    assert len(by_position) == k
    assert all(0 <= share <= 1 for share in by_position)


def test_most_frequent_tokens() -> None:
    assert most_frequent(torch.tensor([5.0, 0.0, 9.0, 1.0, 7.0]), 2).tolist() == [2, 4]


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [training.learning_rate(step, 100, 10, 1.0) for step in range(100)]
    assert rates[9] == 1.0 == max(rates)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=0.01)
