"""Who may import whom, read from the sources and, for torch, from what really gets loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("coordinator", "draft_worker", "target_worker", "engine", "distill", "planning", "rpc")

FORBIDDEN = {
    "coordinator": {"torch", "engine", "draft_worker", "target_worker"},
    "rpc": {"torch", "coordinator", "engine", "draft_worker", "target_worker"},
    "draft_worker": {"coordinator", "target_worker"},
    "distill": {"coordinator", "draft_worker", "target_worker", "specpool"},
    "planning": {"grpc", "google", "specpool", "draft_worker", "target_worker"},
    "target_worker": {"coordinator", "draft_worker"},
    "engine": {"grpc", "google", "specpool", "rpc", "coordinator", "draft_worker", "target_worker", "distill"},
}

PURE = (
    "text", "sequence", "ready", "prefixes", "pool", "grouping", "round", "counters",
    "costs", "acceptance", "trials", "draft_lengths", "ngrams", "drafting",
)  # fmt: skip
PURE_IN_PLANNING = ("plan", "prediction", "scaling")
IMPURE = {"grpc", "google", "specpool", "rpc", "torch", "time", "asyncio", "threading", "datetime", "random", "logging"}

MAY_NAME_STATUS_CODES = {
    "rpc/errors.py",
    "rpc/interceptor.py",
    "coordinator/round_calls.py",
    "coordinator/workers.py",
    "coordinator/fakes.py",
    "coordinator/client/retries.py",
    "coordinator/cli.py",
}
MAY_USE_PROTOBUF = MAY_NAME_STATUS_CODES | {
    "rpc/sampling.py",
    "rpc/worker_service.py",
    "coordinator/server.py",
    "coordinator/service.py",
    "coordinator/validation.py",
    "draft_worker/server.py",
    "draft_worker/service.py",
    "target_worker/server.py",
    "target_worker/service.py",
}
ALSO_AT_THE_EDGE = ("coordinator/commands/", "coordinator/client/")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    """Full names of what a file imports anywhere in it, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top_levels(path: Path) -> set[str]:
    return set(map(top_of, imported(path)))


def top_of(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_nothing_it_must_not(package: str) -> None:
    assert sources(package)
    broken = {name_of(path): found for path in sources(package) if (found := top_levels(path) & FORBIDDEN[package])}
    assert broken == {}


def test_the_check_sees_imports() -> None:
    assert "torch" in set().union(*map(top_levels, sources("engine")))
    assert "grpc" in top_levels(ROOT / "coordinator/workers.py")


@pytest.mark.parametrize("module", PURE)
def test_scheduling_imports_neither_transport_nor_model_nor_clock(module: str) -> None:
    path = ROOT / "coordinator" / f"{module}.py"
    assert top_levels(path) & IMPURE == set()
    own = {name for name in imported(path) if name.startswith("coordinator.")}
    assert {name.split(".")[1] for name in own} <= set(PURE)


@pytest.mark.parametrize("module", PURE_IN_PLANNING)
def test_predictions_import_neither_model_nor_clock(module: str) -> None:
    path = ROOT / "planning" / f"{module}.py"
    assert top_levels(path) & IMPURE == set()
    pure = {"coordinator.costs", "distill.replay", *(f"planning.{name}" for name in PURE_IN_PLANNING)}
    own = {name.rpartition(".")[0] for name in imported(path) if top_of(name) in PACKAGES}
    assert own <= pure


def test_only_the_error_table_and_clients_name_status_codes() -> None:
    files = [path for package in PACKAGES for path in sources(package)]
    named = {name_of(path) for path in files if "StatusCode" in path.read_text()}
    assert {name for name in named - MAY_NAME_STATUS_CODES if not name.startswith(ALSO_AT_THE_EDGE)} == set()
    assert "rpc/errors.py" in named


def test_protobuf_stays_at_the_edges() -> None:
    files = [path for package in PACKAGES for path in sources(package)]
    users = {name_of(path) for path in files if top_levels(path) & {"specpool", "google"}}
    assert {name for name in users - MAY_USE_PROTOBUF if not name.startswith(ALSO_AT_THE_EDGE)} == set()
    assert "coordinator/service.py" in users


def test_coordinator_and_rpc_load_no_torch() -> None:
    files = [path for package in ("coordinator", "rpc") for path in sources(package) if path.stem != "__main__"]
    modules = [name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files]
    assert "coordinator.server" in modules
    program = f"import {', '.join(modules)}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
