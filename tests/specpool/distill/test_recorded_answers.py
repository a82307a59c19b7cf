"""`specpool distill --from DIR`: training on recorded answers, and refusal of unsuitable recordings."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_distill import student_of
from test_distill_command import run

from specpool.distill import main
from specpool.distill.recording import MIN_ANSWERS, split
from specpool.distill.settings import DistillSettings
from specpool.engine.models.draft_weights import load_trained, save_compact
from specpool.engine.models.embedded_pair import draft_weights
from specpool.engine.models.tokenizer import load_tokenizer
from specpool.protocol.recordings import Header, RecordedAnswer
from specpool.protocol.tokenizer import TokenizerFiles

FAST = ["--held-out", "8", "--epochs", "0.3", "--batch-tokens", "200"]
answers_by_client = st.lists(
    st.builds(RecordedAnswer, st.sampled_from("abcdefgh"), st.lists(st.integers(0, 99), min_size=4).map(tuple)),
    min_size=16,
    max_size=100,
    unique_by=lambda answer: answer.token_ids,
)


def header_of(target: Path, **changes: str) -> Header:
    files = TokenizerFiles(load_tokenizer(str(target)).backend_tokenizer.to_str().encode(), "", {}, ())
    return replace(Header("tiny", files.fingerprint, "weights"), **changes)


def record(file: Path, header: Header, answers: list[tuple[int, ...]]) -> Path:
    """Write a shard. Return the folder."""
    file.parent.mkdir(exist_ok=True)
    clients = ("anne", "bob", "carol", "dave")
    lines = [RecordedAnswer(clients[i % 4], answer).encode() for i, answer in enumerate(answers)]
    file.write_bytes(header.encode() + b"".join(lines))
    return file.parent


def random_answers(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    chance = random.Random(seed)
    return [tuple(chance.randrange(256) for _ in range(chance.randint(4, 30))) for _ in range(count)]


def test_training_continues_from_a_draft_on_recorded_answers(
    tmp_path: Path, tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    answers, output, initial = random_answers(MIN_ANSWERS + 20), tmp_path / "output", tmp_path / "initial"
    folder = record(tmp_path / "traffic/answers-1.jsonl", header_of(tiny_pair[0]), answers[:50])
    record(folder / "answers-2.jsonl.part", header_of(tiny_pair[0]), [*answers[40:], (1, 2, 3)])
    with (folder / "answers-2.jsonl.part").open("ab") as shard:
        shard.write(b'{"client":"anne","token_')
    save_compact(initial, student_of(tiny_pair, torch.arange(100)).trained())
    arguments = ["--target", tiny_pair[0], "--from", folder, "--initial", initial, "--output", output, *FAST]
    assert run(main, *arguments) == 0
    shown = capsys.readouterr().out
    assert f"{len(answers) - 8} dialogues" in shown  # without the duplicates and the short one
    assert "before training: agreement 0." in shown
    assert f"specpool up --target {tiny_pair[0]} --draft {output / 'model'}" in shown.replace("\n", " ")
    before, after = load_trained(initial), load_trained(output / "draft.safetensors")
    assert torch.equal(after["output_ids"], before["output_ids"])
    assert not torch.equal(after["head"], before["head"])
    assert not list(output.glob("dialogues-*"))
    assert run(main, *arguments) == 0  # nothing to train
    record(folder / "answers-3.jsonl", header_of(tiny_pair[0]), random_answers(10, seed=1))
    assert run(main, *arguments) == 2
    assert "checkpoint.pt belongs to another draft (answers was " in capsys.readouterr().err


def test_errors_of_unsuitable_recordings_name_the_path(
    tmp_path: Path, tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    header, answers = header_of(tiny_pair[0]), random_answers(MIN_ANSWERS)

    def refused(folder: Path, *messages: Any) -> None:
        assert run(main, "--target", tiny_pair[0], "--from", folder, "--output", tmp_path / "output", *FAST) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("specpool distill: from: ")
        assert all(str(message) in last for message in messages)

    refused(tmp_path / "missing", "missing")
    few = record(tmp_path / "few/answers-1.jsonl", header, [*answers[1:], answers[1]])
    refused(few, few, "has 63 distinct answers, but training needs at least 64")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has 0 distinct answers")
    other = record(tmp_path / "other/answers-1.jsonl", header_of(tiny_pair[0], tokenizer_fingerprint="x"), answers)
    refused(other, other / "answers-1.jsonl", "has answers of tiny, which uses a different tokenizer than the target")
    damaged = record(tmp_path / "damaged/answers-1.jsonl", header, answers)
    (damaged / "answers-2.jsonl").write_text("no shard\n")
    refused(damaged, damaged / "answers-2.jsonl", "line 1")
    large = record(tmp_path / "large/answers-1.jsonl", header, [*answers, (1, 2, 3, 99_999)])
    refused(large, large, "token id 99999")


@given(answers=answers_by_client, held_out=st.integers(1, 20), chance=st.randoms())
def test_the_split_is_deterministic(answers: list[RecordedAnswer], held_out: int, chance: random.Random) -> None:
    apart, others = split(answers, held_out)
    assert sorted([*apart, *others], key=repr) == sorted(answers, key=repr)
    assert 1 <= len(apart) <= min(held_out, len(answers) // 8)
    again, _ = split(chance.sample(answers, len(answers)), held_out)
    assert sorted(again, key=repr) == sorted(apart, key=repr)


def test_training_never_sees_held_out_clients() -> None:
    answers = [RecordedAnswer(f"client {number % 40}", (number, 2, 3, 4)) for number in range(400)]
    apart, others = split(answers, 40)
    assert len(apart) == 40
    assert not {answer.client for answer in apart} & {answer.client for answer in others}


@pytest.mark.parametrize(
    ("chosen", "continues"),
    [({}, True), ({"kind": "feature"}, True), ({"kind": "causal"}, False), ({"layers": "0"}, False),
     ({"output_tokens": 512}, False), ({"target": "other"}, False)],
)  # fmt: skip
def test_the_embedded_draft_is_continued_unless_the_settings_differ(chosen: dict[str, Any], continues: bool) -> None:
    settings = DistillSettings(**{"from": "traffic", **chosen})
    assert settings.draft_to_continue == (draft_weights() if continues else None)
