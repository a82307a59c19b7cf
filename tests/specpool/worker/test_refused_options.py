"""Workers refuse wrong options before they listen and before torch is imported, with one line."""

import subprocess
import sys
from pathlib import Path

import pytest

# Runs a worker whose process cannot import torch.
PROGRAM = """
import importlib, sys
sys.modules["torch"] = None
sys.argv[0:2] = ["worker"]
importlib.import_module(MODULE).main()
"""


@pytest.mark.parametrize(
    ("worker", "flags", "reason"),
    [
        ("target", ["--model", "{target}", "--device", "tpu"], "device: tpu cannot be used: it must be"),
        ("draft", ["--model", "{folder}/file.gguf"], "model: {folder}/file.gguf is not a GGUF file"),
        (
            "target",
            ["--model", "{target}", "--activations", "int8", "--no-native"],
            "activations: int8 needs --native; set activations to auto or float32",
        ),
    ],
    ids=["device", "GGUF", "activations"],
)
def test_wrong_options_end_a_worker_with_one_line(
    tiny_pair: tuple[Path, Path], tmp_path: Path, worker: str, flags: list[str], reason: str
) -> None:
    (tmp_path / "file.gguf").write_text("no model")
    words = {"target": tiny_pair[0], "folder": tmp_path}
    program = PROGRAM.replace("MODULE", repr(f"{worker}_worker.server"))
    command = [sys.executable, "-c", program, "", *(flag.format(**words) for flag in flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"specpool-{worker}-worker: {reason.format(**words)}")
