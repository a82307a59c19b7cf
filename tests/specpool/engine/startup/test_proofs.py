"""A start reuses the proof of an earlier start, unless anything has changed since."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import random_tokens, save_model, small_config

from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.native import library_cache
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.run.engine import Engine
from specpool.engine.startup import loading, proofs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), small_config("llama"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of proofs, which is empty."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(proofs, "candidate_folders", lambda: [tmp_path])
    monkeypatch.setattr(loading, "OUTDATED_SHARE", 0.0)
    return tmp_path / proofs.FOLDER


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were proved from scratch since the fixture began."""
    models: list[str] = []
    start = loading.start_engine

    def start_engine(loaded: Any, *arguments: Any, **options: Any) -> Engine:
        models.append(loaded.name)
        return start(loaded, *arguments, **options)

    monkeypatch.setattr(loading, "start_engine", start_engine)
    return models


def load(model: Path, exact: bool = True, startup_cache: bool = True, **options: Any) -> Engine:
    sizes = {"threads": 1, "max_sequences": 2, "max_model_len": 64, "device": "cpu"}
    return loading.load_engine(EngineOptions(model=str(model), **{**sizes, **options}), exact, startup_cache)


def only_file(cache: Path) -> Path:
    (file,) = cache.glob(f"*{proofs.SUFFIX}")
    return file


@pytest.mark.parametrize("exact", [True, False])
def test_second_start_reuses_the_proof_and_computes_the_same(model: Path, exact: bool, proved: list[str]) -> None:
    first, second = load(model, exact), load(model, exact)
    assert proved == [str(model)]
    assert first.info() == second.info()
    assert second.bitwise == exact
    assert second.step_seconds
    spans = [Span(0, 0, random_tokens(20), 20)]
    assert torch.equal(first.forward(spans), second.forward(spans))


def test_a_copy_of_the_model_reuses_the_proof(model: Path, tmp_path: Path, proved: list[str]) -> None:
    load(model)
    load(save_model(tmp_path / "copy", small_config("llama")))
    assert proved == [str(model)]


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 256}, {"max_sequences": 3}, {"max_model_len": 48}, {"dtype": "bfloat16"}],
)
def test_other_options_need_a_new_proof(model: Path, options: dict[str, Any], proved: list[str]) -> None:
    load(model)
    load(model, **options)
    assert len(proved) == 2


def test_changed_weights_need_a_new_proof(tmp_path: Path, proved: list[str]) -> None:
    folder = save_model(tmp_path / "model", small_config("llama"))
    load(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] += 2**-10
    save_file(weights, file, metadata={"format": "pt"})
    load(folder)
    assert len(proved) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(NativeModel, "library_digest", "another"),
        lambda patch: patch.setattr(proofs, "_cpu", lambda: ["another"]),
        lambda patch: patch.setattr(proofs, "_source_digest", lambda: "another"),
        lambda patch: patch.setattr(proofs.transformers, "__version__", "0"),
        lambda patch: patch.setenv("OMP_PROC_BIND", "close"),
    ],
    ids=["library", "cpu", "source", "version", "variable"],
)
def test_another_machine_or_version_needs_a_new_proof(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], proved: list[str]
) -> None:
    load(model)
    change(monkeypatch)
    assert load(model).bitwise
    assert len(proved) == 2


def test_logits_that_differ_from_the_proof_discard_it(model: Path, cache: Path, proved: list[str]) -> None:
    load(model)
    proof = next(filter(None, [proofs.read_proof(key) for key in keys(cache)]))
    proofs.write_proof(proof.model_copy(update={"logits": "0" * 64, "bitwise": True}))
    assert load(model).numerics_fingerprint == proof.logits
    assert len(proved) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-3]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes().replace(b"true", b"null")),
        lambda file: file.chmod(0o722),
        lambda file: file.parent.chmod(0o777),
    ],
    ids=["cut off", "empty", "edited", "writable by others", "folder open to others"],
)
def test_untrusted_proofs_are_ignored(
    model: Path, cache: Path, damage: Callable[[Path], None], proved: list[str]
) -> None:
    load(model)
    damage(only_file(cache))
    assert load(model).bitwise
    assert len(proved) == 2


def test_a_renamed_proof_is_ignored(model: Path, cache: Path) -> None:
    load(model)
    (key,) = keys(cache)
    only_file(cache).rename(cache / f"{'0' * 32}{proofs.SUFFIX}")
    assert proofs.read_proof("0" * 64) is None
    assert proofs.read_proof(key) is None


def keys(cache: Path) -> list[str]:
    content = only_file(cache).read_bytes()
    return [proofs.Proof.model_validate_json(content[32:]).key]  # after the digest


def test_without_the_startup_cache_nothing_is_kept(model: Path, cache: Path, proved: list[str]) -> None:
    for _ in range(2):
        load(model, startup_cache=False)
    assert len(proved) == 2
    assert not cache.exists()


def test_a_failed_self_test_is_repeated(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(loading, "self_test", lambda engine: False)
        assert not load(model).bitwise
    assert load(model).bitwise


def test_a_torch_pass_is_proved_at_every_start(model: Path, proved: list[str]) -> None:
    for _ in range(2):
        load(model, exact=False, native=False)
    assert len(proved) == 2


def test_step_times_of_a_busy_machine_are_measured_again(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, proved: list[str]
) -> None:
    load(model)
    proof = next(filter(None, map(proofs.read_proof, keys(cache))))
    slow = {rows: 1000 * seconds for rows, seconds in proof.step_seconds.items()}
    proofs.write_proof(proof.model_copy(update={"step_seconds": slow}))
    monkeypatch.setattr(loading, "OUTDATED_SHARE", 0.6)
    assert load(model).step_seconds[1] < slow[1] / 2
    assert len(proved) == 1


def test_first_start_on_a_machine_locks_out_other_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "specpool"
    monkeypatch.setattr(proofs, "candidate_folders", lambda: [folder])
    with proofs.measuring_alone():
        assert (folder / proofs.FOLDER / proofs.LOCK).exists()


def test_proofs_on_a_read_only_file_system_are_used(
    model: Path, monkeypatch: pytest.MonkeyPatch, proved: list[str]
) -> None:
    def utime(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    load(model)
    monkeypatch.setattr(library_cache.os, "utime", utime)
    assert load(model).bitwise
    assert len(proved) == 1


def test_only_one_worker_measures_at_a_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, order = threading.Event(), list[str]()

    def second() -> None:
        began.set()
        with proofs.measuring_alone():
            order.append("second")

    with proofs.measuring_alone():
        thread = threading.Thread(target=second)
        thread.start()
        assert began.wait(30)
        thread.join(0.2)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
    monkeypatch.setattr(proofs, "LOCK_SECONDS", 0.05)
    with proofs.measuring_alone(), proofs.measuring_alone():
        pass  # the wait is bounded
