"""The files of deploy/ against the code that they start, and against each other. No container is started."""

import atexit
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from pathlib import Path
from typing import Any

import grpc
import kubernetes_validate
import pytest
import yaml
from certificates import Authority
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rpc import healthcheck
from rpc.server import LIVE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GPU = "nvidia.com/gpu"
COMMIT = re.compile(r"[0-9a-f]{40}")
COMPONENT = "app.kubernetes.io/component"
WORKERS = ("draft-worker", "target-worker")
ROLES = ("coordinator", *WORKERS)
# Imported only when needed: the workers' settings bring torch along.
SETTINGS = {
    "specpool-coordinator": ("coordinator.settings", "CoordinatorSettings"),
    "specpool-draft-worker": ("draft_worker.server", "DraftWorkerSettings"),
    "specpool-target-worker": ("target_worker.server", "TargetWorkerSettings"),
}
KUSTOMIZATIONS = pytest.mark.parametrize(
    "kustomization", ["base", "overlays/cpu", "overlays/persistent-cache", "overlays/tls"]
)
EVERY_ROLE = pytest.mark.parametrize("role", ROLES)
TARGETS = pytest.mark.parametrize("target", ["coordinator", "worker"])

Manifest = dict[str, Any]


def settings_of(command: list[str], environment: dict[str, str]) -> Any:
    """The settings that this command has in this environment; SystemExit if it would refuse to start."""
    module, name = SETTINGS[command[0]]
    settings = getattr(import_module(module), name)
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.upper().startswith("SPECPOOL_")]:
            patch.delenv(variable)
        for variable, value in environment.items():
            patch.setenv(variable, value)
        return settings.load(command[0], command[1:])


def project() -> dict[str, Any]:
    """The project's own metadata."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


# --- Dockerfile


@dataclass(frozen=True)
class Instruction:
    """One line of a Dockerfile, continuations joined."""

    keyword: str
    arguments: str


@cache
def stages() -> dict[str, list[Instruction]]:
    """The Dockerfile's stages; each begins with its FROM."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, list[Instruction]] = {}
    for line in filter(None, "\n".join(lines).replace("\\\n", "").splitlines()):
        instruction = Instruction(*line.split(maxsplit=1))
        if instruction.keyword == "FROM":
            current = found[instruction.arguments.split()[-1]] = []
        current.append(instruction)
    return found


def image(target: str) -> list[Instruction]:
    """All that makes the image of `target`, from its first base on."""
    base = stages()[target][0].arguments.split()[0]
    return [*(image(base) if base in stages() else []), *stages()[target]]


def arguments_of(target: str, keyword: str) -> list[str]:
    """The arguments of all `keyword` instructions of an image."""
    return [instruction.arguments for instruction in image(target) if instruction.keyword == keyword]


def image_environment(target: str) -> dict[str, str]:
    """The variables that an image sets."""
    words = [word for line in arguments_of(target, "ENV") for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)


@TARGETS
def test_image_does_not_run_as_root_but_as_a_number(target: str) -> None:
    user, group = arguments_of(target, "USER")[-1].split(":")
    assert int(user) > 0
    assert int(group) > 0


def test_only_the_worker_image_has_torch() -> None:
    def installs_torch(target: str) -> bool:
        return any("torch" in line or "worker.txt" in line for line in arguments_of(target, "RUN"))

    assert installs_torch("worker")
    assert not installs_torch("coordinator")
    assert not [name for name in project()["project"]["dependencies"] if re.match(r"torch|accelerate", name)]


@pytest.mark.parametrize("stage", ["wheel", "coordinator", "worker"])
def test_only_wheels_are_installed_whose_hashes_the_constraints_have(stage: str) -> None:
    installs = [line for line in arguments_of(stage, "RUN") if "pip install" in line and "--no-deps" not in line]
    assert len(installs) > 1
    assert all("-c /requirements/constraints.txt" in line or "--require-hashes" in line for line in installs)
    assert image_environment(stage)["PIP_ONLY_BINARY"] == ":all:"


def test_dockerfile_pulls_nothing_by_a_tag_alone() -> None:
    bases = [stage[0].arguments.split()[0] for stage in stages().values()]
    pulled = [base for base in bases if base not in stages()]
    assert pulled
    assert all(re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base) for base in pulled)
    assert "# syntax=" not in (DEPLOY / "Dockerfile").read_text()  # BuildKit would pull that image too


def test_only_the_worker_image_has_a_compiler() -> None:
    with_packages = [stage for stage in stages() if any("apt-get" in line for line in arguments_of(stage, "RUN"))]
    assert with_packages == ["worker"]


@TARGETS
def test_failed_handshakes_write_no_log(target: str) -> None:
    assert image_environment(target)["GRPC_VERBOSITY"] == "ERROR"


@TARGETS
def test_image_starts_a_command_of_the_project_without_a_shell(target: str) -> None:
    command = json.loads([*arguments_of(target, "ENTRYPOINT"), *arguments_of(target, "CMD")][0])
    assert command[0] in project()["project"]["scripts"]


def test_requirements_are_taken_from_the_project(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    [run] = [line.arguments for line in stages()["requirements"] if line.keyword == "RUN"]
    program, *arguments = shlex.split(run)
    assert program == "python"
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True)
    metadata = project()["project"]
    extras = metadata["optional-dependencies"]
    assert (tmp_path / "base.txt").read_text().splitlines() == metadata["dependencies"] + extras["otel"]
    assert (tmp_path / "coordinator.txt").read_text().splitlines() == extras["smg"]
    assert (tmp_path / "worker.txt").read_text().splitlines() == extras["worker"]


def test_builder_is_sent_all_that_the_images_need() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    metadata = project()
    needed = {name.removesuffix("*") for name in metadata["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert "*" in lines
    assert sent == needed | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


# --- Kubernetes


@cache
def render(kustomization: str) -> list[Manifest]:
    """What `kubectl apply -k` would send."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, and kustomizations are built with it")
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / kustomization)]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, ""), built.stderr
    return list(yaml.safe_load_all(built.stdout))


def of_kind(kustomization: str, kind: str) -> dict[str, Manifest]:
    """Manifests of one kind by their names."""
    return {item["metadata"]["name"]: item for item in render(kustomization) if item["kind"] == kind}


def deployment(kustomization: str, role: str) -> Manifest:
    """The one Deployment of a role."""
    [found] = [d for d in of_kind(kustomization, "Deployment").values() if labels(d)[COMPONENT] == role]
    return found


def labels(deployment: Manifest) -> dict[str, str]:
    """The labels of a Deployment's pods."""
    found: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return found


def pod(kustomization: str, role: str) -> Manifest:
    """What a role's pods are."""
    found: Manifest = deployment(kustomization, role)["spec"]["template"]["spec"]
    return found


def container(kustomization: str, role: str) -> Manifest:
    """The one container of a role's pod."""
    [found] = pod(kustomization, role)["containers"]
    assert isinstance(found, dict)
    return found


def pod_settings(kustomization: str, role: str) -> Any:
    """The settings of a role's process in its pod."""
    server = container(kustomization, role)
    environment = image_environment("coordinator" if role == "coordinator" else "worker")
    for source in server.get("envFrom", []):
        environment |= of_kind(kustomization, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    environment |= {item["name"]: item["value"] for item in server.get("env", []) if "value" in item}
    if (secret := mounted(kustomization, role).get("/tls")) is not None:
        files = certificates(secret["secret"]["secretName"])
        environment = {name: re.sub("^/tls(?=/)", str(files), value) for name, value in environment.items()}
    return settings_of([*server["command"], *server.get("args", [])], environment)


def mounted(kustomization: str, role: str) -> dict[str, Manifest]:
    """The volumes of a role's pod by the folders where its process finds them."""
    volumes = {volume["name"]: volume for volume in pod(kustomization, role)["volumes"]}
    return {item["mountPath"]: volumes[item["name"]] for item in container(kustomization, role)["volumeMounts"]}


@cache
def certificates(secret: str) -> Path:
    """A folder with the files of a secret that cert-manager made; one CA has signed all."""
    folder = Path(tempfile.mkdtemp(prefix=secret))
    atexit.register(shutil.rmtree, folder)
    authority = Authority(folder)
    issued = authority.issue(secret, alternative=[f"DNS:{secret.removesuffix('-tls')}"])
    for file, name in ((issued.cert, "tls.crt"), (issued.key, "tls.key"), (authority.path, "ca.crt")):
        file.rename(folder / name)
    return folder


def port_number(server: Manifest, port: int | str) -> int:
    """A container's port by its name or number."""
    [number] = [item["containerPort"] for item in server["ports"] if port in (item["name"], item["containerPort"])]
    assert isinstance(number, int)
    return number


def probe_port(server: Manifest, probe: str) -> int:
    """The port that a probe asks."""
    return port_number(server, server[probe]["grpc"]["port"])


@KUSTOMIZATIONS
def test_manifests_are_valid(kustomization: str) -> None:
    for manifest in render(kustomization):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@KUSTOMIZATIONS
def test_manifests_leave_the_namespace_open(kustomization: str) -> None:
    assert [item for item in render(kustomization) if "namespace" in item["metadata"]] == []


@EVERY_ROLE
@KUSTOMIZATIONS
def test_pod_starts_its_process_with_settings_that_it_accepts(kustomization: str, role: str) -> None:
    server = container(kustomization, role)
    settings = pod_settings(kustomization, role)
    assert server["command"] == [f"specpool-{role}"]
    assert settings.host == "0.0.0.0"
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"grpc": settings.port, "health": settings.health_port}


@EVERY_ROLE
@KUSTOMIZATIONS
def test_image_is_one_that_the_dockerfile_makes_of_this_version(kustomization: str, role: str) -> None:
    name, tag = container(kustomization, role)["image"].split(":")
    assert name == ("specpool-coordinator" if role == "coordinator" else "specpool-worker")
    cpu = "-cpu" if kustomization == "overlays/cpu" and role != "coordinator" else ""
    assert tag == project()["project"]["version"] + cpu


@EVERY_ROLE
@KUSTOMIZATIONS
def test_probes_ask_the_port_where_there_is_only_health(kustomization: str, role: str) -> None:
    server, port = container(kustomization, role), pod_settings(kustomization, role).health_port
    assert {probe_port(server, probe) for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {port}
    assert "grpc" in server["readinessProbe"]


@KUSTOMIZATIONS
def test_coordinator_is_not_restarted_because_its_target_is_away(kustomization: str) -> None:
    server = container(kustomization, "coordinator")
    assert server["livenessProbe"]["grpc"]["service"] == LIVE
    assert server["startupProbe"]["grpc"]["service"] == LIVE


@pytest.mark.parametrize("role", WORKERS)
@KUSTOMIZATIONS
def test_worker_that_hangs_is_restarted_before_it_ends_itself(kustomization: str, role: str) -> None:
    liveness = container(kustomization, role)["livenessProbe"]
    assert liveness["grpc"]["service"] == LIVE
    assert liveness["periodSeconds"] * liveness["failureThreshold"] < pod_settings(kustomization, role).watchdog_seconds


@pytest.mark.parametrize("role", WORKERS)
@KUSTOMIZATIONS
def test_model_is_pinned_to_a_commit(kustomization: str, role: str) -> None:
    assert COMMIT.fullmatch(pod_settings(kustomization, role).revision)


@pytest.mark.parametrize("role", WORKERS)
@KUSTOMIZATIONS
def test_worker_has_time_to_load_before_it_is_restarted(kustomization: str, role: str) -> None:
    startup = container(kustomization, role)["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


@EVERY_ROLE
@KUSTOMIZATIONS
def test_pod_is_killed_only_after_its_drain(kustomization: str, role: str) -> None:
    hook = container(kustomization, role).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain = pod_settings(kustomization, role).drain_seconds
    assert pod(kustomization, role)["terminationGracePeriodSeconds"] > hook + drain


@EVERY_ROLE
@KUSTOMIZATIONS
def test_service_leads_to_the_pods_of_its_deployment(kustomization: str, role: str) -> None:
    service = of_kind(kustomization, "Service")[f"specpool-{role}"]["spec"]
    chosen = [
        name
        for name, item in of_kind(kustomization, "Deployment").items()
        if service["selector"].items() <= labels(item).items()
    ]
    [port] = service["ports"]
    assert chosen == [deployment(kustomization, role)["metadata"]["name"]]
    assert port["port"] == pod_settings(kustomization, role).port
    assert port["port"] == port_number(container(kustomization, role), port["targetPort"])
    assert (service.get("clusterIP") == "None") == (role in WORKERS)


@pytest.mark.parametrize("role", WORKERS)
@KUSTOMIZATIONS
def test_coordinator_is_told_the_services_of_its_workers(kustomization: str, role: str) -> None:
    settings = pod_settings(kustomization, "coordinator")
    address = getattr(settings, role.replace("-worker", "_address"))
    service = of_kind(kustomization, "Service")[address.split(":")[0]]["spec"]
    assert service["selector"][COMPONENT] == role
    assert [port["port"] for port in service["ports"]] == [int(address.split(":")[1])]


@EVERY_ROLE
@KUSTOMIZATIONS
def test_each_worker_asks_for_one_gpu_and_uses_it(kustomization: str, role: str) -> None:
    on_gpu = role in WORKERS and kustomization != "overlays/cpu"
    resources = container(kustomization, role)["resources"]
    assert resources["limits"].get(GPU) == (1 if on_gpu else None)
    assert {"cpu", "memory"} <= resources["requests"].keys()
    if role in WORKERS:
        assert pod_settings(kustomization, role).device == ("cuda" if on_gpu else "cpu")
        assert deployment(kustomization, role)["spec"]["strategy"] == {"type": "Recreate"}


@EVERY_ROLE
@KUSTOMIZATIONS
def test_pod_may_do_little(kustomization: str, role: str) -> None:
    spec, server = pod(kustomization, role), container(kustomization, role)
    target = "coordinator" if role == "coordinator" else "worker"
    user = int(arguments_of(target, "USER")[-1].split(":")[0])
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == user
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert server["securityContext"]["readOnlyRootFilesystem"]
    assert server["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert server["securityContext"]["allowPrivilegeEscalation"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] in of_kind(kustomization, "ServiceAccount")


@EVERY_ROLE
@KUSTOMIZATIONS
def test_kubernetes_adds_no_variables_that_the_process_would_refuse(kustomization: str, role: str) -> None:
    assert pod(kustomization, role)["enableServiceLinks"] is False


@EVERY_ROLE
@KUSTOMIZATIONS
def test_pod_can_write_where_its_process_does(kustomization: str, role: str) -> None:
    volumes = mounted(kustomization, role)
    # The folder of a volume in memory is sticky, and what workers compile is loaded only from there.
    assert volumes["/tmp"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Mi"}
    if role in WORKERS:
        models = volumes[image_environment("worker")["HF_HOME"]]
        persistent = kustomization == "overlays/persistent-cache"
        assert ("persistentVolumeClaim" in models) == persistent
        claims = of_kind(kustomization, "PersistentVolumeClaim")
        assert not persistent or models["persistentVolumeClaim"]["claimName"] in claims


@KUSTOMIZATIONS
def test_only_the_coordinator_may_reach_the_workers(kustomization: str) -> None:
    [policy] = [item["spec"] for item in of_kind(kustomization, "NetworkPolicy").values()]
    [guarded] = policy["podSelector"]["matchExpressions"]
    [rule] = policy["ingress"]
    [source] = rule["from"]
    assert (guarded["key"], guarded["operator"]) == (COMPONENT, "In")
    assert sorted(guarded["values"]) == sorted(WORKERS)
    assert source["podSelector"]["matchLabels"].items() <= labels(deployment(kustomization, "coordinator")).items()
    for role in WORKERS:
        [port] = rule["ports"]
        assert port_number(container(kustomization, role), port["port"]) == pod_settings(kustomization, role).port


@EVERY_ROLE
def test_tls_lets_only_the_coordinator_call_the_workers(role: str) -> None:
    settings = pod_settings("overlays/tls", role)
    secret = mounted("overlays/tls", role)["/tls"]["secret"]
    assert settings.tls_files is not None
    assert settings.tls_files.ca is not None
    assert secret["secretName"] == f"specpool-{role}-tls"
    assert secret["defaultMode"] == 0o440  # the pod's group may read the key
    assert settings.allowed_names == (("specpool-coordinator",) if role in WORKERS else ())
    [port] = of_kind("overlays/tls", "Service")[f"specpool-{role}"]["spec"]["ports"]
    assert port["appProtocol"] == "https"


# --- Compose


@cache
def compose() -> Manifest:
    """The compose file with every variable at its default."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text())
    assert "$" not in text
    loaded: Manifest = yaml.safe_load(text)
    return loaded


def service(role: str) -> Manifest:
    """A role's service in the compose file."""
    found: Manifest = compose()["services"][role]
    return found


def service_settings(role: str) -> Any:
    """The settings of a role's process in its container."""
    target = service(role)["build"]["target"]
    # YAML reads a variable whose default is empty as null; to a container it is an empty string.
    environment = {name: value or "" for name, value in service(role)["environment"].items()}
    return settings_of(service_command(role), image_environment(target) | environment)


def service_command(role: str) -> list[str]:
    """What a role's container runs."""
    given: list[str] | None = service(role).get("command")
    return given or json.loads(arguments_of(service(role)["build"]["target"], "ENTRYPOINT")[-1])


def test_compose_file_follows_its_specification() -> None:
    if util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed, and it has the schema of compose files")
    schema = ["--builtin-schema", "vendor.compose-spec"]
    command = [sys.executable, "-m", "check_jsonschema", *schema, str(DEPLOY / "compose.yaml")]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_compose_has_the_three_processes() -> None:
    assert sorted(compose()["services"]) == sorted(ROLES)


@EVERY_ROLE
def test_container_starts_its_process_with_settings_that_it_accepts(role: str) -> None:
    assert service_command(role) == [f"specpool-{role}"]
    assert service_settings(role).host == "0.0.0.0"
    build = service(role)["build"]
    assert service(role)["image"] == f"specpool-{build['target']}:{project()['project']['version']}"
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


@EVERY_ROLE
def test_container_is_checked_on_the_port_where_there_is_only_health(role: str) -> None:
    runner, *command = service(role)["healthcheck"]["test"]
    assert (runner, command[:3]) == ("CMD", ["python", "-m", healthcheck.__name__])
    assert command[3:] == [f"127.0.0.1:{service_settings(role).health_port}"]


@EVERY_ROLE
def test_container_is_killed_only_after_its_drain(role: str) -> None:
    grace = service(role)["stop_grace_period"]
    assert float(grace.removesuffix("s")) > service_settings(role).drain_seconds


def test_container_of_the_coordinator_is_told_its_workers_and_published() -> None:
    settings = service_settings("coordinator")
    assert settings.target_address == f"target-worker:{service_settings('target-worker').port}"
    assert settings.draft_address == f"draft-worker:{service_settings('draft-worker').port}"
    assert service("coordinator")["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]
    assert "ports" not in service("draft-worker") | service("target-worker")


@pytest.mark.parametrize("role", WORKERS)
def test_container_has_a_model_that_is_pinned_to_a_commit(role: str) -> None:
    assert COMMIT.fullmatch(service_settings(role).revision)


def test_containers_of_the_workers_have_a_gpu_each() -> None:
    devices = [
        device
        for role in WORKERS
        for device in service(role)["deploy"]["resources"]["reservations"]["devices"]
        if "gpu" in device["capabilities"]
    ]
    assert sorted(device["device_ids"] for device in devices) == [["0"], ["1"]]
    assert {service_settings(role).device for role in WORKERS} == {"cuda"}


@EVERY_ROLE
def test_container_can_write_where_its_process_does(role: str) -> None:
    [temporary] = service(role)["tmpfs"]
    folder, _, options = temporary.partition(":")
    assert folder == "/tmp"
    # Docker's default is noexec; workers compile libraries there and load them.
    assert options == ("exec" if role in WORKERS else "")
    if role in WORKERS:
        [volume] = service(role)["volumes"]
        name, path = volume.split(":")
        assert name in compose()["volumes"]
        assert path == image_environment("worker")["HF_HOME"]


# --- The health check of the containers


@pytest.fixture
def server() -> Iterator[tuple[str, health.HealthServicer]]:
    """A server with health, and nothing else."""
    servicer = health.HealthServicer()
    running = grpc.server(ThreadPoolExecutor(max_workers=1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield f"127.0.0.1:{port}", servicer
    running.stop(None).wait()


def test_healthcheck_is_silent_about_a_server_that_serves(
    server: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert healthcheck.main([server[0]]) == 0
    assert capsys.readouterr() == ("", "")


def test_healthcheck_goes_through_no_proxy(
    server: tuple[str, health.HealthServicer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert healthcheck.main([server[0]]) == 0


def test_healthcheck_says_what_a_server_answers_that_does_not_serve(
    server: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    server[1].set("specpool.v1.GenerationService", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert healthcheck.main([server[0], "--service", "specpool.v1.GenerationService"]) == 1
    assert capsys.readouterr().err == f"{server[0]}: NOT_SERVING\n"
    assert healthcheck.main([server[0], "--service", "unknown"]) == 1
    assert "NOT_FOUND" in capsys.readouterr().err


def test_healthcheck_says_in_one_line_that_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert healthcheck.main(["127.0.0.1:1", "--timeout", "2"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("127.0.0.1:1: UNAVAILABLE: ")
    assert message.count("\n") == 1
