"""Dockerfile and compose file against the code that they start, and against each other. No container is started."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from deployment import (
    COMPONENTS,
    DEPLOY,
    ROOT,
    WORKERS,
    arguments_of,
    image_environment,
    project,
    settings_of,
    stages,
)
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specpool import healthcheck

COMMIT = re.compile(r"[0-9a-f]{40}")
EVERY_ROLE = pytest.mark.parametrize("role", COMPONENTS)
TARGETS = pytest.mark.parametrize("target", ["coordinator", "worker"])

Manifest = dict[str, Any]


# --- Dockerfile


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
    command, *arguments = service_command(role)
    return settings_of(command, arguments, image_environment(target) | environment)


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
    assert sorted(compose()["services"]) == sorted(COMPONENTS)


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


def test_workers_are_stopped_only_after_their_coordinator_has_drained() -> None:
    assert {role for role in COMPONENTS if "depends_on" in service(role)} == {"coordinator"}
    assert sorted(service("coordinator")["depends_on"]) == sorted(WORKERS)


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
