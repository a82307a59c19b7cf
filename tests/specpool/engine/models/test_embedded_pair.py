"""The embedded pair and the float32 copy of its target are created once and completely, or not at all."""

import errno
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf_files import save_random_gguf
from safetensors.torch import load_file
from tiny_models import load_engine
from transformers import AutoTokenizer

from specpool.distill.student import Student
from specpool.engine.config.options import EngineOptions
from specpool.engine.models import embedded_pair
from specpool.engine.models.config import load_config
from specpool.engine.models.draft_weights import save_compact
from specpool.engine.models.embedded_pair import Pair, Report, create_pair, draft_weights, float32_copy, save_float32
from specpool.engine.models.weights import read_weights
from specpool.engine.passes.native.model import NativeModel
from specpool.environment.extras import Source

ROOT = Path(__file__).parents[4]


def random_trained(target: Path, rows: int = 100) -> dict[str, torch.Tensor]:
    """Weights as training of a draft with two layers would give them."""
    config = load_config(EngineOptions(model=str(target)))
    model, _ = read_weights(str(target), config, torch.device("cpu"), torch.float32)
    return Student(model, [0, 2], torch.arange(rows)).trained()


def test_the_pair_consists_of_the_target_and_the_shipped_draft(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    trained = random_trained(tiny_pair[0])
    save_compact(tmp_path / "draft.safetensors", trained)

    def make_target(scratch: Path, folder: Path, report: Report) -> None:
        shutil.copytree(tiny_pair[0], folder)

    def create(folder: Path, draft: Path, report: Report) -> None:
        assert draft == ROOT / embedded_pair.DRAFT
        create_pair(folder, tmp_path / "draft.safetensors", report, make_target)

    for name in (*embedded_pair.OLDER, "smollm2-135m-30"):
        (tmp_path / "cache" / name / "target").mkdir(parents=True)
    assert embedded_pair.existing_pair(tmp_path / "cache") is None
    pair = embedded_pair.embedded_pair(tmp_path / "cache", create=create)
    assert embedded_pair.existing_pair(tmp_path / "cache") == pair
    assert embedded_pair.embedded_pair(tmp_path / "cache") == pair
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert left == {embedded_pair.FOLDER, "smollm2-135m-30"}, "removes only older versions"
    draft = load_engine(pair.draft)
    assert draft.bitwise
    assert draft.loaded.output_ids is not None
    assert draft.loaded.output_ids.tolist() == trained["output_ids"].tolist()
    assert isinstance(draft.forward_pass, NativeModel)
    assert draft.forward_pass.kinds.keys() == {"INT8", "BFLOAT16"}


def test_interruptions_leave_no_files(tmp_path: Path) -> None:
    def interrupt(source: Path | str, folder: Path, *_: Report) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "some").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded_pair.embedded_pair(tmp_path, create=partial(create_pair, make_target=interrupt))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / embedded_pair.FOLDER).mkdir()
    with pytest.raises(KeyboardInterrupt):
        float32_copy(tmp_path, interrupt)
    assert list((tmp_path / embedded_pair.FOLDER).iterdir()) == []


def test_installed_packages_read_the_draft_from_their_checkout(tmp_path: Path) -> None:
    weights = ROOT / embedded_pair.DRAFT
    assert draft_weights() == draft_weights(tmp_path, Source(ROOT, is_editable=False)) == weights
    with pytest.raises(OSError, match="wheels do not contain the embedded draft"):
        draft_weights(tmp_path, Source(tmp_path / "a.whl", is_editable=False))


def test_one_process_creates_the_pair_while_others_wait(tmp_path: Path) -> None:
    killed = tmp_path / "partial-killed" / "target"
    killed.mkdir(parents=True)
    waiting, phases, pairs = threading.Event(), list[str](), list[Pair]()

    def create(folder: Path, draft: Path, report: Report) -> None:
        report("creating")
        assert not killed.parent.exists(), "files of a killed process"
        assert waiting.wait(30)
        (folder / "target").mkdir(parents=True)

    def report(phase: str) -> None:
        phases.append(phase)
        if phase.startswith("waiting"):
            waiting.set()

    def get_pair() -> None:
        pairs.append(embedded_pair.embedded_pair(tmp_path, report, create))

    both = [threading.Thread(target=get_pair) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(30)
    assert sorted(phases) == ["creating", "waiting for another process to create the embedded pair"]
    assert pairs == [embedded_pair.existing_pair(tmp_path)] * 2


def test_a_file_system_without_locks_can_hold_the_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(embedded_pair.fcntl, "flock", flock)
    pair = embedded_pair.embedded_pair(tmp_path, create=lambda folder, *_: folder.mkdir())
    assert pair == embedded_pair.existing_pair(tmp_path)


def test_options_can_name_the_models_of_the_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "specpool" / embedded_pair.FOLDER
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = {"embedded-target": f"{folder}/target", "embedded-draft": f"{folder}/draft", "/other": "/other"}
    assert {name: embedded_pair.local_model(name, print) for name in expected} == expected


def test_a_float32_copy_gives_the_same_logits_and_is_created_once(tmp_path: Path) -> None:
    (tmp_path / embedded_pair.FOLDER).mkdir()
    target = save_random_gguf(tmp_path, lambda name: "Q4_1")
    copy = float32_copy(tmp_path, lambda _, folder: save_float32(str(target), folder))
    original, copied = load_engine(target, activations="float32"), load_engine(copy)
    assert isinstance(original.forward_pass, NativeModel)
    assert isinstance(copied.forward_pass, NativeModel)
    assert "Q4_1" in original.forward_pass.kinds
    assert copied.forward_pass.kinds.keys() <= {"FLOAT32", "BFLOAT16"}
    assert original.bitwise
    assert copied.weights_fingerprint == original.weights_fingerprint
    assert copied.numerics_fingerprint == original.numerics_fingerprint != ""
    assert {str(weight.dtype) for weight in load_file(copy / "model.safetensors").values()} == {"torch.float32"}
    assert AutoTokenizer.from_pretrained(copy).is_fast
    assert (copy / "generation_config.json").is_file()
    assert float32_copy(tmp_path, lambda *_: pytest.fail("created again")) == copy


@pytest.mark.slow
@pytest.mark.real_pair
def test_the_shipped_draft_loads_quantized() -> None:
    draft = load_engine(embedded_pair.embedded_pair().draft, max_model_len=400)
    assert draft.bitwise
    assert draft.loaded.output_ids is not None
    assert isinstance(draft.forward_pass, NativeModel)
    assert draft.forward_pass.kinds.keys() == {"Q4_1", "INT8", "Q8_0"}, "Q8_0: the target's embeddings"
