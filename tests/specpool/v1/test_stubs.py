"""The committed stubs are up to date, and the .proto files pass `buf lint`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROTOS = ROOT / "protos"
BIN = Path(sys.executable).parent
"""Has the tools, and may not be on the PATH."""


def stubs(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in (folder / "specpool").rglob("*_pb2*")
        if path.suffix in {".py", ".pyi"}
    }


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_committed_stubs_are_up_to_date(tmp_path: Path) -> None:
    run(sys.executable, ".ci/generate_stubs.py", str(tmp_path))
    committed, generated = stubs(ROOT), stubs(tmp_path)
    assert sorted(committed) == sorted(generated)
    assert [name for name in generated if generated[name] != committed[name]] == []


def test_protos_pass_buf_lint() -> None:
    run(str(BIN / "buf"), "lint")
