"""Regenerate the Python stubs in `specpool/v1`: `python .ci/generate_stubs.py [OUTPUT_FOLDER]`."""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PROTOS = ROOT / "protos"


def generate(output: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi`, `*_pb2_grpc.py` and `*_pb2_grpc.pyi` under `output`."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={output}",
        f"--pyi_out={output}",
        f"--grpc_python_out={output}",
        f"--plugin={Path(sys.executable).with_name('protoc-gen-mypy_grpc')}",
        f"--mypy_grpc_out=quiet:{output}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
