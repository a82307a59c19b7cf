"""A vLLM engine and a draft worker as processes, for tests and benchmarks with the real vLLM.

vLLM needs its own environment. SPECPOOL_VLLM_PYTHON names the Python there; by default, `make test-vllm` installs it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from specpool.cli.processes import worker_environment
from specpool.healthcheck import problem
from specpool.rpc.ports import free_port
from specpool.rpc.security.channel import Connector

ROOT = Path(__file__).parents[1]
PYTHON_VARIABLE = "SPECPOOL_VLLM_PYTHON"
MAX_MODEL_LEN, MAX_ROWS = 1024, 16
SPECULATION: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "remote": {"method": "custom_class", "model": "specpool.vllm.RemoteDraft"},
    "none": {"method": "custom_class", "model": "benchmarks.vllm_engine.NoDrafts"},
}
"""vLLM's `speculative_config` by draft method, without the number of tokens."""
PRELOADED = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "lib/libiomp5.so")
"""Memory allocator and OpenMP that vLLM for CPU should run with, where they exist."""


def vllm_python() -> Path:
    """The Python of vLLM's environment. FileNotFoundError."""
    python = Path(os.environ.get(PYTHON_VARIABLE, ROOT / ".venv-vllm/bin/python"))
    if not python.exists():
        raise FileNotFoundError(f"{python}: no Python with vLLM; {PYTHON_VARIABLE} names another one")
    return python


def vllm_environment(python: Path, draft_address: str | None = None, cores: str = "0-1") -> dict[str, str]:
    """Environment variables of a vLLM process on the CPU. `cores`: cores of each rank, separated by "|"."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPECPOOL_")}
    libraries = [python.parents[1] / library for library in PRELOADED]
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "LD_PRELOAD": ":".join(str(library) for library in libraries if library.exists()),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM's own values for several processes: threads that spin longer take a core from the draft.
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        **({"SPECPOOL_DRAFT_ADDRESS": draft_address} if draft_address else {}),
    }


class VllmEngine:
    """`benchmarks.vllm_engine` in a child process, which loads the model in the background until `wait_ready`."""

    def __init__(
        self, model: Path, kind: str, draft_address: str | None = None, log: IO[str] | None = None, **arguments: Any
    ) -> None:
        """`kind`: a key of `SPECULATION`. `log`: standard error of the process.

        `arguments`: arguments of `vllm.LLM`, plus `cores` (CPU list) and `variables` (environment variables).
        """
        python = vllm_python()
        environment = vllm_environment(python, draft_address, arguments.pop("cores", "0-1"))
        environment |= arguments.pop("variables", {})
        self._process = subprocess.Popen(
            [python, "-c", "from benchmarks.vllm_engine import main; main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        speculation = SPECULATION[kind]
        self._send(
            {
                "model": str(model),
                "dtype": "float32",
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": MAX_ROWS,
                "enable_prefix_caching": False,
                **({"speculative_config": {**speculation, "num_speculative_tokens": 4}} if speculation else {}),
                **arguments,
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> Self:
        """Wait until the model is loaded. RuntimeError: the engine has ended."""
        self._receive()
        return self

    def run(
        self, prompts: list[list[int]], max_tokens: int, at_a_time: int | None = None, schemas: list[Any] | None = None
    ) -> dict[str, Any]:
        """Generate for all prompts, `at_a_time` or all of them in flight. RuntimeError: the engine has ended."""
        self._send({"prompts": prompts, "max_tokens": max_tokens, "at_a_time": at_a_time, "schemas": schemas})
        return self._receive()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class DraftProcess:
    """A draft worker that can be killed and restarted at the same address."""

    def __init__(self, model: Path, threads: int = 2) -> None:
        port = str(free_port())
        self.address = f"127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "draft_worker.server", "--model", str(model), "--port", port]
        self._command += ["--threads", str(threads), "--parent-pid", str(os.getpid()), "--log-level", "error"]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=ROOT, env={**worker_environment(), "PYTHONPATH": str(ROOT)})

    def wait_ready(self, seconds: float = 120.0) -> None:
        """Wait until the worker serves and has measured its costs. RuntimeError."""
        until = time.monotonic() + seconds
        while (reason := problem(Connector(self.address), "", 1.0)) is not None:
            if time.monotonic() > until or self._process.poll() is not None:
                raise RuntimeError(f"the draft worker does not serve: {reason}")
            time.sleep(0.2)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextmanager
def draft_process(model: Path, threads: int = 2) -> Iterator[DraftProcess]:
    draft = DraftProcess(model, threads)
    try:
        yield draft
    finally:
        draft.kill()
