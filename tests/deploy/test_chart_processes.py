"""Commands, environments and certificates of the Helm chart, run with real processes."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import grpc
import pytest
import torch
from certificates import Authority
from deployment import COMPONENTS, ROOT, WORKERS
from health_server import health_server
from helm_chart import DEFAULTS, Manifest, container_of, of_kind, pre_stop_seconds, render, template, values_of
from pod_settings import pod_environment, pod_settings
from serving import PATIENCE_SECONDS, free_address

from specpool import healthcheck
from specpool.engine.config.sources import UnsupportedModelError
from specpool.rpc.ports import free_port
from target_worker.server import load_verifier

BIN = Path(sys.executable).parent
PROGRAMS = {name: f"specpool-{name}" for name in COMPONENTS} | {"http": "specpool-openai"}


def path_with(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), os.environ["PATH"]])


@cache
def manifests() -> list[Manifest]:
    """Return `cpu-kind` with the HTTP server."""
    return template(*values_of("cpu-kind"), "--set", "http.enabled=true")


def environment_of(component: str, **changes: str) -> dict[str, str]:
    """Return the environment of a container of `cpu-kind`, adapted to this machine."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPECPOOL_")}
    local = {"SPECPOOL_HOST": "127.0.0.1", "PATH": path_with(BIN), "PYTHONPATH": str(ROOT)}
    return inherited | pod_environment(manifests(), component) | local | changes


@contextmanager
def processes(pair: tuple[Path, Path], home: Path) -> Iterator[dict[str, tuple[str, str]]]:
    """Run the processes of `cpu-kind` with tiny models; yield the addresses of each server and of its health."""
    addresses = {component: (free_address(), free_address()) for component in PROGRAMS}
    models = {"target-worker": pair[0], "draft-worker": pair[1]}
    with contextlib.ExitStack() as stack:
        for component, (address, probed) in addresses.items():
            changes = {
                f"SPECPOOL_{name}PORT": at.rpartition(":")[2] for name, at in (("", address), ("HEALTH_", probed))
            }
            if component in models:
                changes |= {"SPECPOOL_MODEL": str(models[component]), "HF_HOME": str(home)}
            elif component == "http":
                del changes["SPECPOOL_HEALTH_PORT"]
                changes["SPECPOOL_COORDINATOR_ADDRESS"] = addresses["coordinator"][0]
            else:
                changes |= {f"SPECPOOL_{worker[:-7].upper()}_ADDRESS": addresses[worker][0] for worker in WORKERS}
            environment = environment_of(component, **changes)
            environment.pop("SPECPOOL_REVISION", None)  # a folder has no revision
            process = subprocess.Popen([BIN / PROGRAMS[component]], env=environment, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield addresses


@pytest.mark.slow
def test_processes_serve_and_helm_test_passes(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    test = container_of(manifests(), "test")
    with processes(tiny_pair, tmp_path) as addresses:
        http, _ = addresses.pop("http")
        for component, (_, probed) in addresses.items():
            server, deadline = container_of(manifests(), component), time.monotonic() + 3 * PATIENCE_SECONDS
            startup, liveness = (server[f"{name}Probe"]["grpc"].get("service", "") for name in ("startup", "liveness"))
            while healthcheck.main([probed, "--service", startup]):
                assert time.monotonic() < deadline, component
                time.sleep(0.1)
            assert healthcheck.main([probed, "--service", liveness]) == 0
        environment = environment_of("test", SPECPOOL_ADDRESS=addresses["coordinator"][0], OPENAI_URL=f"http://{http}")
        command = [*test["command"], *test["args"]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *answer, over_http = done.stdout.strip().splitlines()
    assert answer
    assert over_http.endswith(" tokens over HTTP")


def test_helm_test_fails_on_different_answers(tmp_path: Path) -> None:
    test = container_of(render("cpu-kind"), "test")
    (tmp_path / "specpool").write_text("#!/bin/sh\necho $#\n")  # plain decoding passes one more argument
    (tmp_path / "specpool").chmod(0o755)
    environment = {"PATH": path_with(tmp_path), "PROMPT": "x y"}
    assert subprocess.run([*test["command"], *test["args"]], env=environment, check=False).returncode == 1


@pytest.mark.parametrize(("node", "is_serving"), [(0, True), (1, True), (1, False)])
def test_group_pods_delay_shutdown_only_while_serving(node: int, is_serving: bool, tmp_path: Path) -> None:
    slept = tmp_path / "slept"
    (tmp_path / "sleep").write_text(f"#!/bin/sh\necho $1 > {slept}\n")
    (tmp_path / "sleep").chmod(0o755)
    server = container_of(render("two-nodes"), "target-worker", node)
    environment = {"PATH": path_with(tmp_path, BIN), "PYTHONPATH": str(ROOT), "LWS_LEADER_ADDRESS": "127.0.0.1"}
    with health_server(is_serving) as address:
        command = [
            word.replace(":50060", f":{address.rpartition(':')[2]}")
            for word in server["lifecycle"]["preStop"]["exec"]["command"]
        ]
        assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    assert slept.exists() == is_serving
    assert not is_serving or int(slept.read_text()) == pre_stop_seconds(server)


@pytest.mark.skipif(not (BIN / "smg").exists(), reason="smg is not installed")
@pytest.mark.parametrize("cells", [1, 2])
def test_gateway_is_alive_but_not_ready_without_coordinators(cells: int) -> None:
    gateway = container_of(template(*values_of("smg"), "--set", f"cells={cells}"), "smg")
    free = {name: str(free_port()) for name in ("port", "health-check-port", "prometheus-port")}
    changes = {"--host": "127.0.0.1"} | {f"--{name}": port for name, port in free.items()}
    flags = [word.partition("=") for word in gateway["args"]]
    args = [f"{flag}={changes[flag]}" if flag in changes else flag + equals + value for flag, equals, value in flags]

    def status_of(probe: str) -> int | None:
        url = f"http://127.0.0.1:{free['health-check-port']}{gateway[f'{probe}Probe']['httpGet']['path']}"
        try:
            return int(urllib.request.urlopen(url, timeout=3).status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return None

    with subprocess.Popen([BIN / gateway["command"][0], *args], stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while (alive := status_of("liveness")) is None:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert (alive, status_of("readiness")) == (200, 503)
        finally:
            process.kill()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_worker_without_its_gpu_fails(tiny_pair: tuple[Path, Path]) -> None:
    settings = pod_settings(render(DEFAULTS), "target-worker")
    with pytest.raises(UnsupportedModelError, match=r"^device cuda cannot be used: "):
        load_verifier(settings.model_copy(update={"model": str(tiny_pair[0]), "revision": None}), print)


@pytest.mark.parametrize("component", WORKERS)
def test_worker_certificates_match_only_their_own_worker(component: str, tmp_path: Path) -> None:
    names = of_kind(render("tls-cert-manager"), "Certificate")[f"specpool-{component}"]["spec"]["dnsNames"]
    authority = Authority(tmp_path)
    issued = authority.issue("worker", alternative=[f"DNS:{name}" for name in names])
    credentials = grpc.ssl_server_credentials([(issued.key.read_bytes(), issued.cert.read_bytes())])
    with health_server(credentials=credentials) as address:
        for worker, cell in ((worker, cell) for worker in WORKERS for cell in (0, 7)):
            settings = pod_settings(render("tls-cert-manager"), "coordinator", cell)
            host = getattr(settings, worker.replace("-worker", "_address")).partition(":")[0]
            status = healthcheck.main([address, "--tls-ca", str(authority.path), "--tls-name", host])
            assert (status == 0) == (worker == component)
