"""The embedded pair and the float32 copy of its target are created once and completely, or not at all."""

import errno
import shutil
import threading
from collections.abc import Callable
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
from specpool.engine.models.embedded_pair import Pair, float32_copy
from specpool.engine.models.weights import read_weights
from specpool.engine.passes.native.model import NativeModel
from specpool.environment.extras import Source

ROOT = Path(__file__).parents[4]


def random_trained(target: Path, rows: int = 100) -> dict[str, torch.Tensor]:
    """Weights as training of a draft with two layers would give them."""
    config = load_config(EngineOptions(model=str(target)))
    model, _ = read_weights(str(target), config, torch.device("cpu"), torch.float32)
    return Student(model, [0, 2], torch.arange(rows)).trained()


def test_the_pair_consists_of_the_target_and_the_shipped_draft(
    tmp_path: Path, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = random_trained(tiny_pair[0])
    save_compact(tmp_path / "draft.safetensors", trained)
    monkeypatch.setattr(embedded_pair, "DRAFT", tmp_path / "draft.safetensors")
    monkeypatch.setattr(embedded_pair, "_fetch", lambda folder: tiny_pair[0])
    monkeypatch.setattr(embedded_pair, "_make_target", shutil.copytree)
    for name in (*embedded_pair.OLDER, "smollm2-135m-30"):
        (tmp_path / "cache" / name / "target").mkdir(parents=True)
    assert embedded_pair.existing_pair(tmp_path / "cache") is None
    pair = embedded_pair.embedded_pair(tmp_path / "cache")
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


def test_interruptions_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(source: Path | str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "some").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded_pair, "_fetch", lambda folder: folder)
    monkeypatch.setattr(embedded_pair, "_make_target", interrupt)
    monkeypatch.setattr(embedded_pair, "save_float32", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embedded_pair.embedded_pair(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / embedded_pair.FOLDER).mkdir()
    with pytest.raises(KeyboardInterrupt):
        float32_copy(tmp_path)
    assert list((tmp_path / embedded_pair.FOLDER).iterdir()) == []


def test_installed_packages_read_the_draft_from_their_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedded_pair.draft_weights() == ROOT / embedded_pair.DRAFT
    monkeypatch.setattr(embedded_pair, "__file__", str(tmp_path / embedded_pair.DRAFT))
    monkeypatch.setattr(embedded_pair, "installed_from", lambda: Source(ROOT, is_editable=False))
    assert embedded_pair.draft_weights() == ROOT / embedded_pair.DRAFT
    monkeypatch.setattr(embedded_pair, "installed_from", lambda: Source(tmp_path / "a.whl", is_editable=False))
    with pytest.raises(OSError, match="wheels do not contain the embedded draft"):
        embedded_pair.embedded_pair(tmp_path)
    assert list(tmp_path.iterdir()) == [], "fails before it downloads anything"


def test_one_process_creates_the_pair_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = tmp_path / "partial-killed" / "target"
    killed.mkdir(parents=True)
    waiting, phases, pairs = threading.Event(), list[str](), list[Pair]()

    def create(folder: Path, draft: Path, report: Callable[[str], None]) -> None:
        report("creating")
        assert not killed.parent.exists(), "files of a killed process"
        assert waiting.wait(30)
        (folder / "target").mkdir(parents=True)

    def report(phase: str) -> None:
        phases.append(phase)
        if phase.startswith("waiting"):
            waiting.set()

    monkeypatch.setattr(embedded_pair, "_create", create)
    both = [
        threading.Thread(target=lambda: pairs.append(embedded_pair.embedded_pair(tmp_path, report))) for _ in range(2)
    ]
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
    monkeypatch.setattr(embedded_pair, "_create", lambda folder, draft, report: folder.mkdir())
    assert embedded_pair.embedded_pair(tmp_path) == embedded_pair.existing_pair(tmp_path)


def test_options_can_name_the_models_of_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_pair, "embedded_pair", lambda report: Pair(Path("/t"), Path("/d")))
    names = ["embedded-target", "embedded-draft", "/other", "hub/id"]
    assert [embedded_pair.local_model(name, print) for name in names] == ["/t", "/d", "/other", "hub/id"]


def test_a_float32_copy_gives_the_same_logits_and_is_created_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pair").mkdir()
    target = save_random_gguf(tmp_path / "pair", lambda name: "Q4_1")
    monkeypatch.setattr(embedded_pair, "embedded_pair", lambda cache: Pair(target, target))
    copy = float32_copy()
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
    monkeypatch.delattr(embedded_pair, "save_float32")
    assert float32_copy() == copy


@pytest.mark.slow
@pytest.mark.real_pair
def test_the_shipped_draft_loads_quantized() -> None:
    draft = load_engine(embedded_pair.embedded_pair().draft, max_model_len=400)
    assert draft.bitwise
    assert draft.loaded.output_ids is not None
    assert isinstance(draft.forward_pass, NativeModel)
    assert draft.forward_pass.kinds.keys() == {"Q4_1", "INT8", "Q8_0"}, "Q8_0: the target's embeddings"
