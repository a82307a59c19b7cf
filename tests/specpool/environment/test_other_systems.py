"""Systems other than Linux lack functions of `os` and `socket`; processes start without them."""

import asyncio
import os
import resource
import sys
from pathlib import Path

import pytest

from specpool.client import AsyncClient
from specpool.environment.process import usable_cpus
from specpool.rpc.server.connections import OTHER_DESCRIPTORS, usable_descriptors

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 180
# Python imports this module at start, here and in child processes. Only our own code sees another system, because the
# installed torch is that of Linux.
SITE = """
import os, platform, socket, sys
for module, names in ((os, ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "eventfd")),
                      (socket, ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT"))):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
linux = platform.system
def system():
    return "Darwin" if sys._getframe(1).f_globals["__name__"].startswith("specpool") else linux()
platform.system = system
"""


def test_all_cpus_count_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cpus() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable_cpus() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus() == 1


def test_limits_that_cannot_be_raised_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert usable_descriptors(1024) == 256 - OTHER_DESCRIPTORS


@pytest.mark.slow
async def test_up_serves_without_functions_of_linux(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    flags = ["--target", str(tiny_pair[0]), "--draft", str(tiny_pair[1]), "--max-model-len", "256"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specpool.cli.main", "up", "--port", "0", "--http-port", "0", *flags,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert process.stdout is not None
            address = (await process.stdout.readline()).decode().split()[-1]
            async with AsyncClient(address) as client:
                assert len((await client.generate("abc", max_tokens=5, ignore_eos=True)).token_ids) == 5
            process.terminate()
            _, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert b"the forward pass is compiled only on Linux" in log
