"""llama.cpp as a process, for its benchmark: `benchmarks.llamacpp_engine`, run by the Python of its own environment."""

import asyncio
import json
import os
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpool.cli.processes import end

ENGINE = Path(__file__).with_name("llamacpp_engine.py")
PYTHON_VARIABLE = "SPECPOOL_LLAMACPP_PYTHON"
INSTALL = "python3 -m venv DIR && DIR/bin/pip install xllamacpp"
MOST_LINE_BYTES = 2**26
END_SECONDS = 5.0


@dataclass(frozen=True)
class Environment:
    """An environment that has xllamacpp."""

    python: str
    version: str
    """Of xllamacpp."""


def environment() -> Environment:
    """The environment that `SPECPOOL_LLAMACPP_PYTHON` names. RuntimeError: it names none."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        raise RuntimeError(f"{PYTHON_VARIABLE} must name a Python that has xllamacpp, such as that of {INSTALL}")
    try:
        command = [python, "-c", "import xllamacpp; print(xllamacpp.__version__)"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise RuntimeError(f"{PYTHON_VARIABLE}: {python}: {error.strerror}; install one: {INSTALL}") from None
    except subprocess.CalledProcessError:
        raise RuntimeError(f"{PYTHON_VARIABLE}: {python} has no xllamacpp; install it: {INSTALL}") from None
    return Environment(python, done.stdout.strip())


class LlamaCpp:
    """A llama.cpp server that has loaded its model."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message of `benchmarks.llamacpp_engine`. RuntimeError: it has none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with status {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"llama.cpp: {answer['error']}")
        return answer


@asynccontextmanager
async def running_llamacpp(python: str, gguf: Path, slots: int, threads: int, context: int) -> AsyncIterator[LlamaCpp]:
    """Runs llama.cpp with this model. `context`: tokens that each of its slots can hold. RuntimeError, OSError."""
    process = await asyncio.create_subprocess_exec(
        python, str(ENGINE), stdin=PIPE, stdout=PIPE, limit=MOST_LINE_BYTES, start_new_session=True
    )
    try:
        server = LlamaCpp(process)
        await server.ask({"gguf": str(gguf), "slots": slots, "threads": threads, "context": context})
        yield server
    finally:
        await end(process, END_SECONDS)
