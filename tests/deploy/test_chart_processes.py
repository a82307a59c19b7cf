"""Processes with the environment that the Helm chart gives them, started for real; and names in TLS certificates."""

import contextlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import torch
from certificates import Authority
from deployment import COMPONENTS, ROOT, WORKERS
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from helm_chart import DEFAULTS, container_of, of_kind, render, template, values_of
from pod_settings import pod_environment, pod_settings
from serving import PATIENCE_SECONDS, free_address

from specpool import healthcheck
from specpool.engine.config.sources import UnsupportedModelError
from target_worker.server import load_verifier

BIN = Path(sys.executable).parent
Addresses = dict[str, tuple[str, str]]


def environment_of(example: str, component: str, **changes: str) -> dict[str, str]:
    """The environment of a container, on this machine, with other values of a few settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPECPOOL_")}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    chart = pod_environment(render(example), component)
    return inherited | chart | {"SPECPOOL_HOST": "127.0.0.1", "PATH": path, "PYTHONPATH": str(ROOT)} | changes


@contextmanager
def processes(pair: tuple[Path, Path], home: Path) -> Iterator[Addresses]:
    """The three processes of the example for kind, with tiny models; yields where each serves, and where its health."""
    at = {component: (free_address(), free_address()) for component in COMPONENTS}
    models = {"target-worker": pair[0], "draft-worker": pair[1]}
    with contextlib.ExitStack() as stack:
        for component, (address, probed) in at.items():
            ports = {f"SPECPOOL_{name}PORT": at.rpartition(":")[2] for name, at in (("", address), ("HEALTH_", probed))}
            own = {"SPECPOOL_MODEL": str(models[component]), "HF_HOME": str(home)} if component in models else {
                "SPECPOOL_TARGET_ADDRESS": at["target-worker"][0], "SPECPOOL_DRAFT_ADDRESS": at["draft-worker"][0],
            }  # fmt: skip
            environment = environment_of("cpu-kind", component, **ports, **own)
            if component in models:  # a folder has no revision
                del environment["SPECPOOL_REVISION"]
            process = subprocess.Popen([BIN / f"specpool-{component}"], env=environment, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield at


def is_serving(address: str, probe: dict[str, object]) -> bool:
    """What the kubelet would find out by a probe."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=str(probe.get("service", "")))
        with contextlib.suppress(grpc.RpcError):
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=3)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    return False


def test_processes_serve_and_the_test_of_the_release_passes(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    test = container_of(render("cpu-kind"), "test")
    with processes(tiny_pair, tmp_path) as at:
        for component, (_, probed) in at.items():
            server = container_of(render("cpu-kind"), component)
            deadline = time.monotonic() + 3 * PATIENCE_SECONDS
            while not is_serving(probed, server["startupProbe"]["grpc"]):
                assert time.monotonic() < deadline, component
                time.sleep(0.1)
            assert is_serving(probed, server["livenessProbe"]["grpc"])
        environment = environment_of("cpu-kind", "test", SPECPOOL_ADDRESS=at["coordinator"][0])
        command = [*test["command"], *test["args"]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_release_whose_answers_differ_fails_its_test(tmp_path: Path) -> None:
    test = container_of(render("cpu-kind"), "test")
    (tmp_path / "specpool").write_text("#!/bin/sh\necho $#\n")  # one more argument without speculation
    (tmp_path / "specpool").chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PROMPT": "x y"}
    assert subprocess.run([*test["command"], *test["args"]], env=environment, check=False).returncode == 1


@pytest.mark.skipif(not (BIN / "smg").exists(), reason="smg is not installed")
@pytest.mark.parametrize("cells", [1, 2])
def test_gateway_starts_before_its_coordinators_and_says_that_it_is_not_ready(cells: int) -> None:
    gateway = container_of(template(*values_of("openai"), "--set", f"cells={cells}"), "smg")
    ports = {port["name"]: free_address().rpartition(":")[2] for port in [*gateway["ports"], {"name": "metrics"}]}
    changes = {"--host": "127.0.0.1", "--port": ports["http"], "--health-check-port": ports["health"],
               "--prometheus-port": ports["metrics"]}  # fmt: skip
    flags = [item.partition("=") for item in gateway["args"]]
    args = [f"{flag}={changes[flag]}" if flag in changes else flag + equals + value for flag, equals, value in flags]
    process = subprocess.Popen([BIN / gateway["command"][0], *args], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (alive := status_of(ports["health"], gateway["livenessProbe"])) == 0:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert (alive, status_of(ports["health"], gateway["readinessProbe"])) == (200, 503)
    finally:
        process.kill()
        process.wait()


def status_of(port: str, probe: dict[str, dict[str, str]]) -> int:
    """What the kubelet would be answered to a probe by HTTP; 0 for nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=3)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", probe["httpGet"]["path"])
        return connection.getresponse().status
    return 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_worker_without_its_gpu_says_so(tiny_pair: tuple[Path, Path]) -> None:
    settings = pod_settings(render(DEFAULTS), "target-worker")
    with pytest.raises(UnsupportedModelError, match=r"^device cuda cannot be used: "):
        load_verifier(settings.model_copy(update={"model": str(tiny_pair[0]), "revision": None}))


@pytest.mark.parametrize("component", WORKERS)
def test_certificate_of_a_worker_has_the_name_by_which_it_is_called(component: str, tmp_path: Path) -> None:
    def names(worker: str) -> list[str]:
        listed = of_kind(render("tls-cert-manager"), "Certificate")[f"specpool-{worker}"]["spec"]["dnsNames"]
        return [f"DNS:{name}" for name in listed]

    authority = Authority(tmp_path)
    issued = authority.issue("worker", alternative=names(component))
    servicer = health.HealthServicer()
    running = grpc.server(ThreadPoolExecutor(max_workers=1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
    identity = [(issued.key.read_bytes(), issued.cert.read_bytes())]
    port = running.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(identity))
    running.start()

    def check(cell: int, worker: str) -> int:
        settings = pod_settings(render("tls-cert-manager"), "coordinator", cell)
        host = getattr(settings, worker.replace("-worker", "_address")).partition(":")[0]
        return healthcheck.main([f"127.0.0.1:{port}", "--tls-ca", str(authority.path), "--tls-name", host])

    assert [check(cell, component) for cell in (0, 7)] == [0, 0]
    assert check(0, next(worker for worker in WORKERS if worker != component)) == 1
    running.stop(None).wait()
