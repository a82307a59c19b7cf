"""Fixtures shared by several test files."""

import ctypes
import gc
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"  # run kernels on the CPU; Triton reads this when it imports them
# Spinning threads would steal cores from tests that run in parallel.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["GOMP_SPINCOUNT"] = "0"
# A shell's background job ignores Ctrl-C, and so would the processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from certificates import Authority, Certificate

settings.register_profile("specpool", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None)  # pytest --hypothesis-profile thorough
settings.load_profile("specpool")


def pytest_collection_finish() -> None:
    """Spare garbage collections the imported modules and the collected tests, which live to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _always_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call see the current state, certificates and tokens."""
    monkeypatch.setattr("coordinator.workers.states.RECENT_SECONDS", 0.0)
    monkeypatch.setattr("specpool.rpc.security.tls.CHECK_SECONDS", 0.0)


@pytest.fixture
def clients_by_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let metadata name the client of a call, because all connections come from one host."""
    for module in ("coordinator.serving.intake", "coordinator.serving.service", "specpool.rpc.server.limits"):
        monkeypatch.setattr(
            f"{module}.client_of", lambda context: str(dict(context.invocation_metadata()).get("client", ""))
        )


@pytest.fixture
def cuda_driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA driver with two GPUs, and a torch for CUDA."""

    def count(reference: Any) -> int:
        reference._obj.value = fake.count
        return 0

    fake = SimpleNamespace(count=2, status=0, missing=False, cuda="13.0", hip=None)
    library = SimpleNamespace(cuInit=lambda flags: fake.status, cuDeviceGetCount=count)

    def load(name: str) -> Any:
        if fake.missing:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(sys, "platform", "linux")
    version = lambda path: {"__version__": "2.13.0", "cuda": fake.cuda, "hip": fake.hip}  # noqa: E731
    monkeypatch.setattr(runpy, "run_path", version)
    return fake


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny random target model and its draft."""
    from tiny_pair import make_tiny_pair  # imports transformers, which takes seconds

    return make_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The CA of `server`."""
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A CA that others do not trust."""
    return Authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="module")
def server(ca: Authority) -> Certificate:
    """A server's certificate from `ca`."""
    return ca.issue("server")


@pytest.fixture
def cpu_threads() -> int:
    """Number of threads for exactness tests."""
    return int(os.environ.get("SPECPOOL_TEST_THREADS", "2"))


@pytest.fixture(autouse=True, scope="session")
def _no_last_resort() -> Iterator[None]:
    """Stopping a server in this process must not end the process."""
    with mock.patch("specpool.rpc.server.signals._end"):
        yield
