"""`specpool distill` and `specpool.distill.evaluate` with valid and invalid arguments."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_nets import save_delta_net
from test_distill import student_of, target_of
from tiny_models import load_engine, save_model, small_config
from tiny_pair import make_tiny_pair
from transformers import AutoConfig

from specpool.distill import evaluate, main, preparation
from specpool.distill.examples import Dialogues
from specpool.distill.questions import Limits
from specpool.distill.settings import DistillSettings
from specpool.distill.student import Student, check_weights
from specpool.engine.models.draft_weights import load_trained, save_compact
from specpool.engine.passes.native.model import NativeModel

TINY = ["--held-out", "8", "--dialogues", "64", "--output-tokens", "256", "--epochs", "0.3", "--batch-tokens", "200"]


def run(command: Any, *arguments: object) -> int:
    """Run a command; return its exit status."""
    try:
        command.main([*map(str, arguments)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def kinds_of(model: Path) -> set[str]:
    """The kinds of weights in the compiled pass of a draft."""
    draft = load_engine(model, exact=False).forward_pass
    assert isinstance(draft, NativeModel)
    return set(draft.kinds)


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncate answers and allow long questions, because random models rarely end a turn."""
    monkeypatch.setattr(preparation, "LIMITS", Limits(max_question=400, max_answer=12))


@pytest.mark.slow
@pytest.mark.usefixtures("short_answers")
def test_training_continues_with_new_dialogues(
    tmp_path: Path, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, more = tmp_path / "first", tmp_path / "more"
    assert run(main, "--target", tiny_pair[0], "--output", first, *TINY) == 0
    assert "agreement 0." in capsys.readouterr().out
    draft = load_trained(first / "draft.safetensors")
    initial = ["--initial", first / "draft.safetensors", "--seed", 1, "--output", more]
    assert run(main, "--target", tiny_pair[0], *TINY, *initial) == 0
    again = load_trained(more / "draft.safetensors")
    assert again.keys() == draft.keys()
    assert torch.equal(again["output_ids"], draft["output_ids"])
    assert not torch.equal(again["head"], draft["head"])
    torch.testing.assert_close(again["head"], draft["head"], atol=0.05, rtol=0.05)
    # The checkpoint belongs to a draft with other settings.
    assert run(main, "--target", tiny_pair[0], *TINY, *initial[:2], "--output", first) == 2
    assert "output: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("short_answers")
def test_an_existing_draft_is_rounded_without_training(
    tmp_path: Path, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = student_of(tiny_pair, torch.arange(100)).trained()
    save_compact(tmp_path / "initial", trained)
    output = tmp_path / "output"
    arguments = ["--target", tiny_pair[0], *TINY, "--initial", tmp_path / "initial", "--epochs", 0, "--output", output]

    monkeypatch.setattr(main, "MAX_LOSS", 1)
    assert run(main, *arguments) == 0
    assert "4-bit weights: agreement 0." in capsys.readouterr().out
    assert not (output / "checkpoint.pt").exists()
    before, after = load_trained(tmp_path / "initial"), load_trained(output / "draft-4bit.safetensors")
    assert before.keys() == after.keys()
    assert torch.equal(after["output_ids"], before["output_ids"])
    assert torch.equal(after["body.norm.weight"], before["body.norm.weight"])
    assert 0.01 < (after["head"] - before["head"]).norm() / before["head"].norm() < 0.2
    for name, weight in load_trained(output / "draft.safetensors").items():
        torch.testing.assert_close(weight, before[name])
    assert kinds_of(output / "model") == {"Q4_1", "INT8", "BFLOAT16"}

    monkeypatch.setattr(main, "MAX_LOSS", -1)
    assert run(main, *arguments) == 0
    assert "keeping int8: 4-bit weights lose more than" in capsys.readouterr().out
    assert not (output / "draft-4bit.safetensors").exists()
    assert kinds_of(output / "model") == {"INT8", "BFLOAT16"}

    monkeypatch.setattr(main, "MAX_LOSS", 1)  # a draft that an earlier run has trained needs no --initial
    rounding = [argument for argument in arguments if argument not in ("--initial", tmp_path / "initial")]
    assert run(main, *rounding) == 0
    assert kinds_of(output / "model") == {"Q4_1", "INT8", "BFLOAT16"}


@pytest.mark.slow
@pytest.mark.usefixtures("short_answers")
def test_writer_for_a_gpu_limits_answers(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    settings = DistillSettings(output=tmp_path, max_sequences=4)
    made = preparation.static_writer(settings, str(tiny_pair[0]))
    assert made is not None
    lengths = [len(example.top_ids) for _, example in made[1].write(range(8), lag=64)]
    assert max(lengths) == 12
    assert min(lengths) > 0


@pytest.mark.usefixtures("short_answers")
def test_an_interrupted_run_continues_to_the_same_dialogues(
    tmp_path: Path, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def generate(folder: Path) -> dict[str, bytes]:
        folder.mkdir(exist_ok=True)
        settings = DistillSettings(output=folder, dialogues=72, held_out=8, max_sequences=16)
        preparation.generate_dialogues(settings, str(tiny_pair[0]))
        return {file.name: file.read_bytes() for file in preparation.dialogue_files(settings)}

    def save_and_stop(dialogues: Dialogues, path: Path) -> None:
        save(dialogues, path)
        raise KeyboardInterrupt

    whole, parts, save = tmp_path / "whole", tmp_path / "parts", Dialogues.save
    expected = generate(whole)
    assert [len(Dialogues.load(whole / name).lengths) for name in sorted(expected)] == [16, 16, 16, 16, 8]
    assert "generating: 72 of 72 dialogues" in capsys.readouterr().out
    with monkeypatch.context() as patched:
        patched.setattr(Dialogues, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            generate(parts)
    (first,) = parts.iterdir()
    written = first.stat().st_mtime_ns
    assert generate(parts) == expected
    assert first.stat().st_mtime_ns == written


def test_a_target_with_few_positions_is_refused_by_name(
    tmp_path: Path, tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_pair[0], target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    assert run(main, "--target", target, "--output", tmp_path / "draft", *TINY) == 2
    reason = f"{target} has 256 positions (max_position_embeddings); a dialogue needs "
    assert f"specpool distill: target: {reason}" in capsys.readouterr().err
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": 1, "prompt": "x" * 300}))
    pair = ["--target", target, "--model", target]
    assert run(evaluate, "--prompts", tmp_path / "prompts.jsonl", *pair) == 2
    assert "prompts: all are longer than 32 tokens (256 positions less 224 for the answer)" in capsys.readouterr().err


def test_no_writer_for_a_gpu_with_other_layers(tmp_path: Path) -> None:
    target = save_model(tmp_path, small_config("olmo2"))
    assert preparation.static_writer(DistillSettings(output=tmp_path), str(target)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "a,b"], "layers"),
        (["--epochs", "0"], "epochs: 0 only rounds a draft, but draft/draft.safetensors does not exist; give"),
        (["--layers", "0,99"], "layers: 99 is not below 3"),
        (["--target", "mtp"], "target: mtp is a draft"),
        (["--held-out", "64", "--dialogues", "64"], "held-out: 64 is not below"),
        (["--epochs", "inf"], "epochs"),
        (["--peak-rate", "inf"], "peak-rate"),
        (["--seed", str(2**70)], "seed"),
        (["--target", "/nope"], "target: /nope"),
        (["--device", "foo"], "device: foo cannot be used"),
        (["--initial", "/nope"], "initial: "),
        (["--output", __file__], "output: "),
    ],
)
def test_invalid_arguments_fail_before_anything_is_written(
    tmp_path: Path, tiny_pair: tuple[Path, Path], arguments: list[str], message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(main, "--target", tiny_pair[0], *arguments) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in last
    assert last.startswith("specpool distill: ")
    assert not list(tmp_path.rglob("dialogues-*"))


def test_unsupported_target_architecture_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_model(tmp_path / "target", small_config("gpt2", n_embd=64, n_head=4, n_layer=2))
    assert run(main, "--target", target, "--output", tmp_path / "draft") == 2
    assert "gpt2 does not have the structure of Llama" in capsys.readouterr().err


def test_layers_without_attention_are_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_delta_net(tmp_path / "target")
    assert run(main, "--target", target, "--output", tmp_path / "draft", "--layers", "0,2") == 2
    assert "layers: [0, 2] are all recurrent; a draft needs at least one layer " in capsys.readouterr().err


def test_feature_drafts_of_other_layers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_model(tmp_path / "target", small_config("gemma2"))
    assert run(main, "--target", target, "--output", tmp_path / "draft", "--kind", "feature") == 2
    assert "kind: feature drafts support gemma, llama, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trained: trained.pop("head"), "head or output_ids is missing"),
        (lambda trained: trained.update(head=torch.zeros(100, 32)), r"head: shape \[100, 32\]"),
        (lambda trained: trained.pop("body.norm.weight"), "body.norm.weight: shape none"),
        (lambda trained: trained["output_ids"].add_(1000), "1099 is beyond the target's"),
        (lambda trained: trained.update({"body.layers.x.w": torch.zeros(2)}), "body.layers.2"),
    ],
)
def test_mismatched_initial_weights_are_refused(tiny_pair: tuple[Path, Path], change: Any, message: str) -> None:
    trained = student_of(tiny_pair, torch.arange(100)).trained()
    config = AutoConfig.from_pretrained(tiny_pair[0])
    check_weights(trained, config)
    change(trained)
    with pytest.raises(ValueError, match=message):
        check_weights(trained, config)


def test_targets_with_per_layer_attention_types_are_supported(tmp_path: Path) -> None:
    target = target_of((save_model(tmp_path, small_config("qwen3", num_hidden_layers=4)), tmp_path))
    student = Student(target, [0, 3], torch.arange(100))
    assert len(student.body.layers) == 2
    check_weights(student.trained(), target.config)


# --- Evaluation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "prompts: "),
        ("\n", "has no prompts"),
        ('{"turns": ["a"]}\nno json', "line 2 is no prompt"),
        ('{"x": 1}', "line 1 lacks a prompt"),
        ('{"turns": []}', "line 1 lacks a prompt"),
        ('{"turns": ["a"], "category": ["b"]}', "line 1 is no prompt"),
        ('{"messages": [{"role": "user"}]}', "line 1 lacks a prompt"),
        ("[1]", "line 1 is no prompt"),
        ('{"id": 1, "prompt": 2}', "line 1 is no prompt"),
    ],
)
def test_invalid_prompts_are_named_by_line(
    tmp_path: Path, text: str | None, message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    prompts = tmp_path / "prompts.jsonl"
    if text is not None:
        prompts.write_text(text)
    assert run(evaluate, "--prompts", prompts) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nope"], "model: /nope"),
        (["--target", "/nope"], "target: /nope"),
        (["--max-model-len", "4096"], "target: --max-model-len"),
        (["--model", "OTHER", "--max-model-len", "512"], "uses a different tokenizer than"),
    ],
)
def test_incompatible_models_are_refused(
    tmp_path: Path, tiny_pair: tuple[Path, Path], arguments: list[str], message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": ["a"]}))
    if "OTHER" in arguments:
        other, _ = make_tiny_pair(tmp_path / "other")
        file = other / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["!"], vocabulary["A"] = vocabulary["A"], vocabulary["!"]
        file.write_text(json.dumps(tokenizer))
        arguments = [str(other) if argument == "OTHER" else argument for argument in arguments]
    pair = ["--target", tiny_pair[0], "--model", tiny_pair[1], "--max-model-len", 512]
    assert run(evaluate, "--prompts", tmp_path / "prompts.jsonl", *pair, *arguments) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
