"""llama.cpp's server for the benchmarks: PyPI's xllamacpp, in the Python that SPECPOOL_LLAMACPP_PYTHON names."""

import asyncio
import json
import os
import subprocess
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from specpool.cli.processes import end

SERVER = Path(__file__).with_name("llamacpp_server.py")
PYTHON_VARIABLE = "SPECPOOL_LLAMACPP_PYTHON"
INSTALL = "python3 -m venv DIR && DIR/bin/pip install xllamacpp"
MAX_LINE_BYTES, END_SECONDS = 2**26, 5.0


@dataclass(frozen=True)
class Engine:
    """Settings of llama.cpp's process."""

    python: str
    gguf: Path
    threads: int


def environment() -> tuple[str, str]:
    """Return the Python that SPECPOOL_LLAMACPP_PYTHON names, and its xllamacpp version. Raises RuntimeError."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        raise RuntimeError(f"{PYTHON_VARIABLE} must name a Python that has xllamacpp; to install one: {INSTALL}")
    try:
        command = [python, "-c", "import xllamacpp; print(xllamacpp.__version__)"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise RuntimeError(f"{PYTHON_VARIABLE}: {python}: {error.strerror}; to install one: {INSTALL}") from None
    except subprocess.CalledProcessError:
        raise RuntimeError(f"{PYTHON_VARIABLE}: {python} has no xllamacpp; to install it: {INSTALL}") from None
    return python, done.stdout.strip()


def only_gguf(folder: Path) -> Path:
    """Return the GGUF file of a model folder. Raises RuntimeError if there is none, or several."""
    files = list(folder.glob("*.gguf"))
    if len(files) != 1:
        raise RuntimeError(f"{folder} has {len(files)} GGUF files instead of one; choose a file with --gguf")
    return files[0]


@asynccontextmanager
async def running_llamacpp(engine: Engine, slots: int, context: int) -> AsyncIterator[str]:
    """Run llama.cpp and yield its address. `context`: tokens per slot. Raises RuntimeError or OSError."""
    process = await asyncio.create_subprocess_exec(
        engine.python, str(SERVER), stdin=PIPE, stdout=PIPE, start_new_session=True
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        start = {"gguf": str(engine.gguf), "slots": slots, "threads": engine.threads, "context": context}
        process.stdin.write(json.dumps(start).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with status {await process.wait()}")
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"llama.cpp: {answer['error']}")
        yield answer["address"]
    finally:
        await end(process, END_SECONDS)


async def completion(address: str, prompt: list[int], tokens: int, **options: bool) -> AsyncIterator[list[int]]:
    """Yield the token ids of a greedy answer: one list, or many with `stream`. Raises RuntimeError or OSError."""
    request = {
        "prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0.0, "cache_prompt": False,
        "return_tokens": True, **options,
    }  # fmt: skip
    body = json.dumps(request).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=MAX_LINE_BYTES)
    try:
        writer.write(head.encode() + body)
        async for line in reader:  # skip headers and chunk sizes
            if not (text := line.decode().removeprefix("data: ")).startswith("{"):
                continue
            answer = json.loads(text)
            if "error" in answer:
                raise RuntimeError(f"llama.cpp: {answer['error']['message']}")
            yield answer["tokens"]
    finally:
        writer.close()
