"""Import rules between folders, checked in the sources; for torch and grpc also in the loaded modules."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("specpool", "coordinator", "draft_worker", "target_worker")
GENERATED = "specpool/v1/"
ENGINE = "specpool/engine"

# Packages that the files of a folder must not import directly, although the floors would allow it.
WORKERS = {"draft_worker", "target_worker"}
FORBIDDEN = {
    "specpool/errors": {"torch", "google", "specpool"},
    "specpool/protocol": {"torch", "grpc"},
    "specpool/rpc": {"torch", "specpool.protocol.rounds", "specpool.protocol.codec"},
    "specpool/engine": {"grpc", "google", "specpool.v1"},
    "specpool/worker": {"torch", "specpool.engine"},
    "specpool/client": {"torch", "specpool.engine", "specpool.protocol"},
    "specpool/distill": {"specpool.v1"},
    "specpool/openai": {"coordinator", "torch", "transformers", "specpool.engine", "specpool.protocol",
                        "specpool.worker", *WORKERS},
    "coordinator": {"torch", "specpool.engine", "specpool.worker", "specpool.client"},
    "specpool/planning": {"coordinator", "specpool.worker", *WORKERS},
    "specpool/cli": {"coordinator", "torch", "specpool.worker", *WORKERS},
    "specpool/vllm": {"coordinator", "torch", "vllm", "numpy", "specpool.engine", "specpool.worker", "specpool.client",
                      *WORKERS},
}  # fmt: skip
# Programs on top of the coordinator: the command starts it, the planner encodes prompts as it does, and vLLM's process
# connects to the draft worker through the same link.
ALLOWED = {
    "specpool/cli": {"coordinator.config", "specpool.worker.settings"},
    "specpool/planning": {"coordinator.prompts"},
    "specpool/vllm": {"coordinator.workers"},
}
# Pure folders, without torch, protobuf, clock or random generator, and the project packages that they may import.
PURE = {
    "coordinator/scheduling": {"coordinator.scheduling", "specpool.drafting", "specpool.protocol"},
    "specpool/drafting": {"specpool.drafting", "specpool.protocol"},
}
PURE_BESIDE_VLLM = ("costs", "drafter", "rows")
IMPURE = {"grpc", "google", "torch", "time", "asyncio", "threading", "datetime", "random", "logging"}

MAY_NAME_STATUS_CODES = {
    "specpool/rpc/status.py",
    "specpool/rpc/server/interceptor.py",
    "specpool/rpc/observability/tracing.py",  # OpenTelemetry's codes
    "coordinator/workers/streams.py",
    "coordinator/workers/draft_link.py",
    "coordinator/workers/link.py",
    "coordinator/workers/target_link.py",
    "specpool/testing/fake_worker.py",
    "specpool/client/failures.py",
    "specpool/openai/errors.py",
    "specpool/errors/__init__.py",
    "specpool/cli/probes.py",
}
# The edges, where protobuf messages are allowed.
EDGES = (
    "coordinator/prompts/chat_reader.py",
    "coordinator/prompts/constraint_reader.py",
    "coordinator/prompts/prediction_reader.py",
    "coordinator/prompts/prompt_reader.py",
    "coordinator/prompts/reasoning_reader.py",
    "coordinator/prompts/token_reader.py",
    "coordinator/requests/traces.py",
    "coordinator/requests/validation.py",
    "coordinator/server.py",
    "coordinator/serving/",
    "coordinator/smg/",
    "coordinator/requests/traces.py",
    "coordinator/workers/",
    "draft_worker/",
    "specpool/cli/",
    "specpool/client/",
    "specpool/openai/",
    "specpool/planning/",
    "specpool/protocol/",
    "specpool/rpc/",
    "specpool/testing/",
    "specpool/vllm/",
    "specpool/worker/",
    "target_worker/",
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def sources(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py")) if not folder.endswith(".py") else [ROOT / folder]
    return [path for path in files if not name_of(path).startswith(GENERATED)]


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imported(path: Path) -> set[str]:
    """Return full names of a file's imports, including those in functions and under TYPE_CHECKING."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {name_of(path)}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def top_levels(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


ALL = [path for package in PACKAGES for path in sources(package)]


def edges() -> set[tuple[Path, Path]]:
    """Return pairs of an importing and an imported file of the project."""
    paths = {module_of(path): path for path in ALL}
    pairs = {(path, paths.get(name) or paths.get(name.rpartition(".")[0])) for path in ALL for name in imported(path)}
    return {(path, other) for path, other in pairs if other is not None and other != path}


def reject_cycles(pairs: set[tuple[str, str]]) -> None:
    """Raise CycleError, which names the members of a cycle."""
    graph = defaultdict(set)
    for importer, other in pairs:
        if importer != other:
            graph[importer].add(other)
    TopologicalSorter(graph).prepare()


# --- Cycles


def test_modules_have_no_import_cycles() -> None:
    reject_cycles({(name_of(path), name_of(other)) for path, other in edges()})


@pytest.mark.parametrize("depth", range(1, 6))
def test_folders_have_no_import_cycles(depth: int) -> None:
    """Treat a folder and everything below it as one node: `specpool/engine`, then `specpool/engine/passes`, and so on.

    The modules of `specpool` itself are one node: the folders below them import none of them.
    """

    def node(path: Path) -> str:
        folders = path.relative_to(ROOT).parent.parts
        return "/".join(folders[: depth + (folders[0] == "specpool")])

    reject_cycles({(node(path), node(other)) for path, other in edges()})


# --- Floors


def test_imports_go_down_the_floors_of_the_development_page() -> None:
    rows = re.findall(r"^\| (\d) \| (.+?) \|", (ROOT / "docs/development.md").read_text(), re.MULTILINE)
    floors = {folder: int(floor) for floor, names in rows for folder in re.findall(r"`([\w/]+)(?:/|\.py)`", names)}

    def folder_of(path: Path) -> str:
        parts = path.relative_to(ROOT).with_suffix("").parts
        return "/".join(parts[: 1 + (parts[0] == "specpool")])

    pairs = {(folder_of(path), folder_of(other)) for path, other in edges() if path.parent != ROOT / "specpool"}
    assert {pair for pair in pairs if len(set(pair)) > 1 and floors[pair[0]] <= floors[pair[1]]} == set()


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folders_respect_their_floor(folder: str) -> None:
    broken = {
        (name_of(path), name)
        for path in sources(folder)
        for name in imported(path)
        if is_within(name, FORBIDDEN[folder]) and not is_within(name, ALLOWED.get(folder, set()))
    }
    assert broken == set()


def test_imports_are_detected() -> None:
    assert "torch" in set().union(*map(top_levels, sources(ENGINE)))
    assert "grpc" in top_levels(ROOT / "coordinator/workers/link.py")
    assert all(sources(folder) for folder in (*FORBIDDEN, *PURE))


def impure_imports(path: Path, allowed: set[str]) -> set[str]:
    own = {name for name in imported(path) if name.startswith(PACKAGES)}
    return (top_levels(path) & IMPURE) | {name for name in own if not is_within(name, allowed)}


@pytest.mark.parametrize("folder", PURE)
def test_scheduling_and_drafting_are_pure(folder: str) -> None:
    assert {name_of(path): imports for path in sources(folder) if (imports := impure_imports(path, PURE[folder]))} == {}


@pytest.mark.parametrize("module", PURE_BESIDE_VLLM)
def test_drafting_for_vllm_is_pure(module: str) -> None:
    allowed = {*PURE["specpool/drafting"], *(f"specpool.vllm.{name}" for name in PURE_BESIDE_VLLM)}
    assert impure_imports(ROOT / f"specpool/vllm/{module}.py", allowed) == set()


# --- Names that belong to one place


def test_only_the_error_table_and_clients_name_status_codes() -> None:
    named = {name_of(path) for path in ALL if "StatusCode" in path.read_text()}
    assert named - MAY_NAME_STATUS_CODES == set()
    assert "specpool/rpc/status.py" in named


def test_protobuf_stays_at_the_edges() -> None:
    users = {
        name_of(path) for path in ALL if any(is_within(name, {"specpool.v1", "google"}) for name in imported(path))
    }
    assert {name for name in users if not name.startswith(EDGES)} == set()
    assert "coordinator/serving/service.py" in users


def test_only_one_folder_imports_opentelemetry() -> None:
    users = {name_of(path.parent) for path in ALL if "opentelemetry" in top_levels(path)}
    assert users == {"specpool/rpc/observability"}


def test_only_one_folder_imports_the_gateway() -> None:
    assert {name_of(path.parent) for path in ALL if "smg_grpc_proto" in top_levels(path)} == {"coordinator/smg"}


# --- Loaded modules


def loaded_by(*modules: str) -> set[str]:
    """Return the top-level modules that a new process has loaded after importing these."""
    program = f"import {', '.join(modules)}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120, capture_output=True)
    return set(done.stdout.decode().split())


def test_clients_and_coordinator_load_no_torch_opentelemetry_or_gateway() -> None:
    folders = ("specpool/client", "specpool/cli", "specpool/openai", "specpool/protocol", "specpool/rpc",
               "specpool/testing", "specpool/worker", "coordinator")  # fmt: skip
    modules = [module_of(path) for path in ALL if name_of(path).startswith(folders)]
    assert loaded_by("specpool", *modules) & {"torch", "opentelemetry"} == set()
    assert "smg_grpc_proto" not in loaded_by("specpool", "coordinator.server")


def test_clients_load_only_the_base_dependencies() -> None:
    modules = [module_of(path) for path in sources("specpool/client")]
    loaded = loaded_by("specpool.rpc.security.channel", "specpool.rpc.status", "specpool.environment.process", *modules)
    assert loaded - loaded_by("grpc", "google.rpc.status_pb2") - {*sys.stdlib_module_names} == {"specpool"}


def test_engine_loads_no_grpc() -> None:
    """Nor does what it imports. Loading it would take seconds, because of torch."""
    reached, waiting = set[Path](), {ROOT / "specpool/engine/startup/loading.py"}
    imports = edges()
    while waiting:
        reached |= waiting
        waiting = {other for path, other in imports if path in waiting} - reached
    assert ROOT / "specpool/engine/run/engine.py" in reached
    assert {name_of(path) for path in reached if top_levels(path) & {"grpc", "google"}} == set()
