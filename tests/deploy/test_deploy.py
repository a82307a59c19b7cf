"""Checks Dockerfile, compose file and container health check against the code, without starting containers."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import COMPONENTS, DEPLOY, ROOT, WORKERS, arguments_of, image_environment, project, settings_of, stages
from health_server import health_server

from specpool import healthcheck

EVERY_ROLE = pytest.mark.parametrize("role", COMPONENTS)


# --- Dockerfile


@pytest.mark.parametrize("target", ["coordinator", "worker"])
def test_images_run_one_command_as_a_numeric_user(target: str) -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", arguments_of(target, "USER")[-1])
    command = json.loads([*arguments_of(target, "ENTRYPOINT"), *arguments_of(target, "CMD")][0])
    assert command[0] in project()["project"]["scripts"]
    assert image_environment(target)["GRPC_VERBOSITY"] == "NONE"  # its lines may quote callers


def test_only_the_worker_image_has_torch_and_a_compiler() -> None:
    installs = {target: " ".join(arguments_of(target, "RUN")) for target in ("coordinator", "worker")}
    assert all(word in installs["worker"] for word in ("torch", "worker.txt", "gcc"))
    assert not any(word in installs["coordinator"] for word in ("torch", "worker.txt", "apt-get"))
    metadata = project()["project"]
    shared = [*metadata["dependencies"], *metadata["optional-dependencies"]["coordinator"]]
    assert not [name for name in shared if re.match(r"torch|accelerate", name)]


@pytest.mark.parametrize("stage", ["wheel", "coordinator", "worker"])
def test_images_install_only_wheels_with_known_hashes(stage: str) -> None:
    installs = [line for line in arguments_of(stage, "RUN") if "pip install" in line and "--no-deps" not in line]
    assert len(installs) > 1
    assert all("-c /requirements/constraints.txt" in line or "--require-hashes" in line for line in installs)
    assert image_environment(stage)["PIP_ONLY_BINARY"] == ":all:"


def test_base_images_are_pinned_by_digest() -> None:
    bases = [stage[0].arguments.split()[0] for stage in stages().values()]
    pulled = [base for base in bases if base not in stages()]
    assert pulled
    assert all(re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base) for base in pulled)
    assert "# syntax=" not in (DEPLOY / "Dockerfile").read_text()  # BuildKit would pull that image too


def test_requirements_come_from_the_project(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    [run] = [line.arguments for line in stages()["requirements"] if line.keyword == "RUN"]
    program, *arguments = shlex.split(run)
    assert program == "python"
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True)
    base, extras = project()["project"]["dependencies"], project()["project"]["optional-dependencies"]
    written = {path.stem: path.read_text().splitlines() for path in tmp_path.glob("*.txt")}
    (cli, *coordinator), (included, *worker) = extras["coordinator"], extras["worker"]
    assert (cli, included) == ("specpool[cli]", "specpool[coordinator,http]")
    assert extras["http"][0] == "specpool[cli]"
    both = [*base, *extras["cli"], *coordinator, *extras["http"][1:], *extras["constraints"], *extras["otel"]]
    assert written == {"base": both, "coordinator": extras["smg"], "worker": worker}


def test_build_context_has_all_files_for_the_wheel() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    packages = {name.removesuffix("*") for name in project()["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert "*" in lines
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert sent == packages | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


# --- Compose


@cache
def services() -> dict[str, Any]:
    """Return the services of the compose file with every variable at its default."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text())
    assert "$" not in text
    parsed: dict[str, Any] = yaml.safe_load(text)["services"]
    return parsed


def command_of(role: str) -> list[str]:
    service = services()[role]
    given: list[str] | None = service.get("command")
    return given or json.loads(arguments_of(service["build"]["target"], "ENTRYPOINT")[-1])


def service_settings(role: str) -> Any:
    """Return the settings of a role's process in its container."""
    # YAML reads an empty default as null; the container gets an empty string.
    environment = {name: value or "" for name, value in services()[role]["environment"].items()}
    command, *arguments = command_of(role)
    return settings_of(command, arguments, image_environment(services()[role]["build"]["target"]) | environment)


def test_compose_file_is_valid() -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, DEPLOY / "compose.yaml"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@EVERY_ROLE
def test_containers_accept_their_settings(role: str) -> None:
    service, settings = services()[role], service_settings(role)
    assert command_of(role) == [f"specpool-{role}"]
    assert settings.host == "0.0.0.0"
    build = service["build"]
    assert service["image"] == f"specpool-{build['target']}:{project()['project']['version']}"
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    check = ["CMD", "python", "-m", healthcheck.__name__, f"127.0.0.1:{settings.health_port}"]
    assert service["healthcheck"]["test"] == check
    assert float(service["stop_grace_period"].removesuffix("s")) > settings.drain_seconds


def test_coordinator_finds_its_workers_and_is_published_on_loopback() -> None:
    settings, service = service_settings("coordinator"), services()["coordinator"]
    assert settings.target_address == f"target-worker:{service_settings('target-worker').port}"
    assert settings.draft_address == f"draft-worker:{service_settings('draft-worker').port}"
    assert service["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]
    assert sorted(service["depends_on"]) == sorted([*WORKERS, "target-worker-2"])  # compose stops the coordinator first
    assert service["tmpfs"] == ["/tmp"]


def test_http_server_finds_the_coordinator_and_is_published_on_loopback() -> None:
    service, coordinator = services()["http"], services()["coordinator"]
    environment = image_environment("coordinator") | service["environment"]
    settings = settings_of(*service["entrypoint"], [], environment)
    assert settings.host == "0.0.0.0"
    assert settings.coordinators == [f"coordinator:{service_settings('coordinator').port}"]
    assert (service["image"], service["build"]) == (coordinator["image"], coordinator["build"])
    assert service["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]
    assert f"http://127.0.0.1:{settings.port}/health" in service["healthcheck"]["test"][-1]
    assert "coordinator" in service["depends_on"]  # compose stops the server first


def test_a_profile_adds_a_target_that_differs_only_in_its_gpu() -> None:
    first, second = services()["target-worker"], services()["target-worker-2"]
    assert second == first | {"profiles": ["two-targets"], "deploy": second["deploy"]}
    assert services()["coordinator"]["depends_on"]["target-worker-2"]["required"] is False


class OverrideLoader(yaml.SafeLoader):
    """Reads `!reset`, which removes a value of the first compose file, as None."""


OverrideLoader.add_constructor("!reset", lambda loader, node: None)


def test_on_one_gpu_the_targets_carry_the_draft() -> None:
    override = yaml.load((DEPLOY / "compose.one-gpu.yaml").read_text(), OverrideLoader)["services"]
    draft, coordinator = service_settings("draft-worker"), override["coordinator"]
    assert override["draft-worker"] is None
    assert coordinator == {"depends_on": {"draft-worker": None}, "environment": {"SPECPOOL_DRAFT_ADDRESS": None}}
    for role in ("target-worker", "target-worker-2"):
        variables = override[role]["environment"].items()
        given = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in variables}
        environment = {name: value or "" for name, value in services()[role]["environment"].items()}
        settings = settings_of("specpool-target-worker", [], image_environment("worker") | environment | given)
        assert (settings.draft, settings.draft_revision) == (draft.model, draft.revision)


@pytest.mark.parametrize(("role", "gpu"), [("target-worker", "0"), ("target-worker-2", "2"), ("draft-worker", "1")])
def test_workers_have_a_gpu_a_pinned_model_and_a_writable_cache(role: str, gpu: str) -> None:
    service, settings = services()[role], service_settings(role)
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["device_ids"], device["capabilities"], settings.device) == ([gpu], ["gpu"], "cuda")
    assert re.fullmatch(r"[0-9a-f]{40}", settings.revision)
    assert service["tmpfs"] == ["/tmp:exec"]  # Docker's default is noexec; workers load compiled libraries from there
    assert service["volumes"] == [f"models:{image_environment('worker')['HF_HOME']}"]
    assert not {"ports", "depends_on"} & service.keys()


# --- The health check of the containers


def test_healthcheck_reports_the_status_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):  # the check never uses a proxy
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with health_server() as address:
        assert healthcheck.main([address]) == 0
        assert capsys.readouterr() == ("", "")
        assert healthcheck.main([address, "--service", "unknown"]) == 1
        assert "no service 'unknown'" in capsys.readouterr().err
    with health_server(is_serving=False) as address:
        assert healthcheck.main([address]) == 1
        assert capsys.readouterr().err == f"{address}: NOT_SERVING\n"
    assert healthcheck.main(["127.0.0.1:1", "--timeout", "2"]) == 1
    assert re.fullmatch(r"127\.0\.0\.1:1: UNAVAILABLE: .+\n", capsys.readouterr().err)
