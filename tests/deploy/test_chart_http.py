"""The HTTP server in the Helm chart: settings, certificates, probes and `helm test`, checked against the real code."""

import contextlib
import json
import os
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from certificates import TOKEN
from deployment import project
from helm_chart import CHART, container_of, of_kind, pod_template, pre_stop_seconds, render, template, values_of
from pod_settings import certificates, mounted, pod_environment, pod_settings
from serving import PATIENCE_SECONDS, free_address

CASES = pytest.mark.parametrize("name", ["openai", "http", "production"])
ENABLED = ["--set", "http.enabled=true"]


@CASES
def test_the_server_accepts_its_settings_and_finds_the_coordinators(name: str) -> None:
    manifests = render(name)
    server, settings = container_of(manifests, "http"), pod_settings(manifests, "http")
    coordinators = of_kind(manifests, "Service")["specpool-coordinator"]["spec"]
    assert server["command"] == ["specpool-openai"]
    assert server["image"].rpartition("/")[2] == f"specpool-coordinator:{project()['project']['version']}"
    assert settings.host == "0.0.0.0"
    assert server["ports"] == [{"name": "http", "containerPort": settings.port}]
    assert of_kind(manifests, "Service")["specpool-http"]["spec"]["ports"][0]["port"] == settings.port
    port = coordinators["ports"][0]["port"]
    assert settings.coordinators == [f"dns:///specpool-coordinator.default.svc:{port}"]
    assert coordinators["clusterIP"] == "None"  # its name has a record for each ready coordinator
    grace = pod_template(manifests, "http")["spec"]["terminationGracePeriodSeconds"]
    assert grace > pre_stop_seconds(server) + settings.drain_seconds


@CASES
def test_certificates_have_the_names_that_peers_verify(name: str) -> None:
    issued = of_kind(render(name), "Certificate")
    names = {each: item["spec"]["dnsNames"] for each, item in issued.items()}
    settings = pod_settings(render(name), "http")
    secret = mounted(render(name), "http")["/tls"]["secret"]["secretName"]
    assert secret == issued["specpool-http"]["spec"]["secretName"]
    assert settings.coordinator_tls_name in names["specpool-coordinator"]
    address = pod_environment(render(name), "test")["OPENAI_URL"]
    assert address == f"https://specpool-http.default.svc:{settings.port}"
    assert "specpool-http.default.svc" in names["specpool-http"]


@pytest.mark.parametrize(
    ("values", "own", "to_coordinators"),
    [
        ("tls.enabled=false", "none", "none"),
        ("tls.enabled=true", "mutual", "mutual"),
        ("tls.enabled=true,tls.clients=server", "server", "server"),
        ("tls.enabled=true,tls.clients=server,http.tls=none", "none", "server"),
        ("tls.enabled=true,tls.clients=none", "none", "none"),
        ("tls.enabled=true,http.tls=server,auth.apiTokens.existingSecret=x,tests.tokenSecret=x", "server", "mutual"),
    ],
)
def test_tls_to_clients_and_coordinators(values: str, own: str, to_coordinators: str) -> None:
    manifests = template(*ENABLED, "--set", values)
    settings, coordinator = pod_settings(manifests, "http"), pod_settings(manifests, "coordinator")
    sides = [(settings.tls_cert, settings.tls_ca), (settings.coordinator_tls_ca, settings.coordinator_tls_cert)]
    assert [kind_of(*side) for side in sides] == [own, to_coordinators]
    assert kind_of(coordinator.tls_cert, coordinator.tls_ca) == to_coordinators
    probe = container_of(manifests, "http")["readinessProbe"]
    scheme = probe["httpGet"]["scheme"] if own != "mutual" else "exec"
    assert scheme == {"none": "HTTP", "server": "HTTPS", "mutual": "exec"}[own]
    protocol = of_kind(manifests, "Service")["specpool-http"]["spec"]["ports"][0]["appProtocol"]
    assert protocol == ("http" if own == "none" else "https")


def kind_of(for_one_side: Path | None, for_both: Path | None) -> str:
    return "mutual" if for_both else "server" if for_one_side else "none"


def test_replicas_are_fixed_or_follow_the_cpu_and_drain_one_at_a_time() -> None:
    assert of_kind(render("openai"), "Deployment")["specpool-http"]["spec"]["replicas"] == 2
    assert "replicas" not in of_kind(render("http"), "Deployment")["specpool-http"]["spec"]
    scaler = of_kind(render("http"), "HorizontalPodAutoscaler")["specpool-http"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 5)
    assert "cpu" in container_of(render("http"), "http")["resources"]["requests"]  # utilization is relative to this
    for name in ("openai", "http"):
        assert of_kind(render(name), "PodDisruptionBudget")["specpool-http"]["spec"]["maxUnavailable"] == 1
    single = template(*ENABLED)
    assert "specpool-http" not in of_kind(single, "PodDisruptionBudget")  # it could only block a drain
    given = template(*ENABLED, "--set", "http.replicas=4,http.podDisruptionBudget.maxUnavailable=50%")
    assert of_kind(given, "PodDisruptionBudget")["specpool-http"]["spec"]["maxUnavailable"] == "50%"
    without = template(*ENABLED, "--set", "http.replicas=4,http.podDisruptionBudget.enabled=false")
    assert "specpool-http" not in of_kind(without, "PodDisruptionBudget")


def test_only_named_peers_reach_the_server_and_it_reaches_coordinators() -> None:
    policies = {name: item["spec"]["ingress"] for name, item in of_kind(render("http"), "NetworkPolicy").items()}
    api, metrics = policies["specpool-http"]
    assert api["ports"] == metrics["ports"] == [{"port": "http"}]
    assert [next(iter(peer)) for peer in api["from"]] == ["namespaceSelector", "podSelector"]
    assert [next(iter(peer)) for peer in metrics["from"]] == ["namespaceSelector"]
    own = policies["specpool-coordinators"][0]["from"][-1]["podSelector"]["matchExpressions"]
    assert "http" in own[0]["values"]


def test_prometheus_presents_a_certificate_where_clients_must() -> None:
    [endpoint] = of_kind(render("http"), "ServiceMonitor")["specpool-http"]["spec"]["endpoints"]
    issued = {name: item["spec"] for name, item in of_kind(render("http"), "Certificate").items()}
    assert (endpoint["port"], endpoint["scheme"]) == ("http", "https")
    assert endpoint["tlsConfig"]["cert"]["secret"]["name"] == issued["specpool-client"]["secretName"]
    assert endpoint["tlsConfig"]["serverName"] in issued["specpool-http"]["dnsNames"]


class FakeServer(BaseHTTPRequestHandler):
    """Answers as the HTTP server does, and records the requests."""

    requests: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "tiny"
        self.answer({"usage": {"completion_tokens": body["max_tokens"]}})

    def answer(self, content: object) -> None:
        self.requests.append((self.path, self.headers["Authorization"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def fake_server(folder: Path) -> Iterator[tuple[int, list[tuple[str, str | None]]]]:
    """Serve HTTPS that demands a client certificate; yield the port and the requests."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
    tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    tls.verify_mode = ssl.CERT_REQUIRED
    handler = type("Handler", (FakeServer,), {"requests": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, handler.requests
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("name", ["http", "openai"])
def test_without_coordinators_the_server_is_alive_but_not_ready(name: str) -> None:
    server, environment = container_of(render(name), "http"), pod_environment(render(name), "http")
    address = free_address()
    port = address.rpartition(":")[2]
    environment |= {"SPECPOOL_PORT": port, "SPECPOOL_HOST": "127.0.0.1", "SPECPOOL_COORDINATOR_ADDRESS": free_address()}
    folder = certificates(mounted(render(name), "http")["/tls"]["secret"]["secretName"])

    def succeeds(probe: str) -> bool:
        """Run a probe as the kubelet does: inside the container, or without verifying the certificate."""
        given = server[f"{probe}Probe"]
        if "exec" in given:
            *python, script = given["exec"]["command"]
            assert python == ["python", "-c"]
            local = script.replace("/tls/", f"{folder}/").replace(":8000/", f":{port}/")
            return subprocess.run([sys.executable, "-c", local], stderr=subprocess.DEVNULL, check=False).returncode == 0
        with contextlib.suppress(OSError):
            url = f"{given['httpGet']['scheme'].lower()}://{address}{given['httpGet']['path']}"
            with urllib.request.urlopen(url, context=ssl._create_unverified_context()) as response:
                return bool(response.status == 200)
        return False

    command = [Path(sys.executable).parent / server["command"][0]]
    with subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not succeeds("startup"):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert (succeeds("liveness"), succeeds("readiness")) == (True, False)
        finally:
            process.kill()


def test_helm_test_sends_the_token_over_mutual_tls() -> None:
    tokens = ["--set", "auth.apiTokens.existingSecret=x,tests.tokenSecret=x"]
    manifests = template(*values_of("http"), *tokens)
    script = (CHART / "tests/ask_openai.py").read_text()
    assert script in container_of(manifests, "test")["args"][0]
    folder, environment = certificates("localhost-tls"), pod_environment(manifests, "test")
    environment |= {
        name: f"{folder}/{Path(value).name}" for name, value in environment.items() if name.startswith("SPECPOOL_TLS_")
    }
    with fake_server(folder) as (port, requests):
        environment["OPENAI_URL"] = f"https://localhost:{port}"
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "tiny: 32 tokens over HTTP\n"), done.stderr
    assert requests == [(path, f"Bearer {TOKEN}") for path in ("/v1/models", "/v1/chat/completions")]
