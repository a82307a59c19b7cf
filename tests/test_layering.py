"""Rules for imports between folders, checked in the sources and, for torch, by the modules that really get loaded."""

import ast
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("specpool", "coordinator", "draft_worker", "target_worker")
GENERATED = "specpool/v1/"
ENGINE = "specpool/engine"

# What the files of a folder must not import directly, by prefix; indirect imports are not checked.
WORKERS = {"draft_worker", "target_worker"}
SERVICES = {"coordinator", *WORKERS}
FORBIDDEN = {
    "specpool/protocol": {"torch", "grpc", "specpool.engine", "specpool.worker", "specpool.rpc", *SERVICES},
    "specpool/rpc": {
        "torch", "specpool.engine", "specpool.protocol.rounds", "specpool.protocol.codec", "specpool.worker", *SERVICES,
    },
    "specpool/client": {"torch", "specpool.engine", "specpool.worker", "specpool.protocol", *SERVICES},
    "specpool/cli": {"torch", "specpool.worker", *WORKERS},
    # vLLM takes the coordinator's place: the coordinator's own parts draft for it, and vLLM loads our class itself.
    "specpool/vllm": {
        "torch", "vllm", "numpy", "specpool.engine", "specpool.worker", "specpool.client", "specpool.cli", *WORKERS,
    },
    "specpool/worker": {"torch", "specpool.engine", *SERVICES},
    "specpool/engine": {
        "grpc", "google", "specpool.v1", "specpool.rpc", "specpool.worker", "specpool.client", "specpool.distill",
        *SERVICES,
    },
    "specpool/distill": {"specpool.client", "specpool.cli", "specpool.v1", "specpool.worker", *SERVICES},
    "specpool/planning": {"specpool.worker", *WORKERS},
    "coordinator": {"torch", "specpool.engine", "specpool.worker", "specpool.client", "specpool.cli", *WORKERS},
    "draft_worker": {"coordinator", "target_worker"},
    "target_worker": {"coordinator", "draft_worker"},
}  # fmt: skip
ALLOWED = {"specpool/cli": {"specpool.worker.settings"}}
# Folders without torch, protobuf, a clock or a random generator of their own, and project packages they may import.
PURE = {
    "coordinator/scheduling": {"coordinator.scheduling", "specpool.protocol"},
    "coordinator/drafting": {"coordinator.drafting", "coordinator.scheduling", "specpool.protocol"},
}
PURE_BESIDE_VLLM = ("costs", "drafter", "pacing", "rows")
IMPURE = {"grpc", "google", "torch", "time", "asyncio", "threading", "datetime", "random", "logging"}

MAY_NAME_STATUS_CODES = {
    "specpool/rpc/errors.py",
    "specpool/rpc/server/interceptor.py",
    "specpool/rpc/observability/tracing.py",  # those of OpenTelemetry
    "coordinator/workers/streams.py",
    "coordinator/workers/draft_link.py",
    "coordinator/workers/link.py",
    "coordinator/workers/target_link.py",
    "specpool/testing/fakes.py",
    "specpool/testing/garbage.py",
    "specpool/client/retries.py",
    "specpool/cli/processes.py",
}
# Where protobuf messages are known: the edges.
EDGES = (
    "coordinator/prompts/reading.py",
    "coordinator/requests/validation.py",
    "coordinator/server.py",
    "coordinator/serving/",
    "coordinator/smg/",
    "coordinator/workers/",
    "draft_worker/",
    "specpool/cli/",
    "specpool/client/",
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
    files = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in files if not name_of(path).startswith(GENERATED)]


ALL = [path for package in PACKAGES for path in sources(package)]


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(path: Path) -> set[str]:
    """Full names of everything that a file imports, including imports inside functions and for type checkers only."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def top_levels(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def edges() -> set[tuple[Path, Path]]:
    """Pairs of a file and a file of the project that it imports."""
    paths = {module_of(path): path for path in ALL}

    def owner(name: str) -> Path | None:
        return paths.get(name) or paths.get(name.rpartition(".")[0])

    found = {(path, owner(name)) for path in ALL for name in imported(path)}
    return {(path, other) for path, other in found if other is not None and other != path}


def refuse_cycles(pairs: set[tuple[str, str]]) -> None:
    """CycleError names the folders of a cycle."""
    graph = defaultdict(set)
    for importer, other in pairs:
        if importer != other:
            graph[importer].add(other)
    TopologicalSorter(graph).prepare()


def test_no_module_imports_itself_by_way_of_others() -> None:
    refuse_cycles({(name_of(path), name_of(other)) for path, other in edges()})


@pytest.mark.parametrize("depth", range(1, 6))
def test_no_folder_imports_itself_by_way_of_others(depth: int) -> None:
    """A folder counts with everything below it: first `specpool/engine`, then `specpool/engine/passes`, and so on.

    `specpool` alone is no floor: its library is below the services, and its commands are above them.
    """

    def floor(path: Path) -> str:
        folders = path.relative_to(ROOT).parent.parts
        return "/".join(folders[: depth + (folders[0] == "specpool")])

    refuse_cycles({(floor(path), floor(other)) for path, other in edges()})


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_nothing_it_must_not(folder: str) -> None:
    broken = {
        (name_of(path), name)
        for path in sources(folder)
        for name in imported(path)
        if is_within(name, FORBIDDEN[folder]) and not is_within(name, ALLOWED.get(folder, set()))
    }
    assert broken == set()


def test_the_check_sees_imports() -> None:
    assert "torch" in set().union(*map(top_levels, sources(ENGINE)))
    assert "grpc" in top_levels(ROOT / "coordinator/workers/link.py")
    assert all(sources(folder) for folder in (*FORBIDDEN, *PURE))


@pytest.mark.parametrize("folder", PURE)
def test_scheduling_and_drafting_import_neither_transport_nor_model_nor_clock(folder: str) -> None:
    for path in sources(folder):
        assert top_levels(path) & IMPURE == set(), name_of(path)
        own = {name for name in imported(path) if name.startswith(PACKAGES)}
        assert {name for name in own if not is_within(name, PURE[folder])} == set()


@pytest.mark.parametrize("module", PURE_BESIDE_VLLM)
def test_what_drafts_for_vllm_is_as_pure_as_drafting(module: str) -> None:
    path = ROOT / "specpool/vllm" / f"{module}.py"
    assert top_levels(path) & IMPURE == set()
    pure = {*PURE["coordinator/drafting"], *(f"specpool.vllm.{name}" for name in PURE_BESIDE_VLLM)}
    own = {name for name in imported(path) if name.startswith(PACKAGES)}
    assert {name for name in own if not is_within(name, pure)} == set()


def test_only_the_error_table_and_clients_name_status_codes() -> None:
    named = {name_of(path) for path in ALL if "StatusCode" in path.read_text()}
    assert named - MAY_NAME_STATUS_CODES == set()
    assert "specpool/rpc/errors.py" in named


def test_protobuf_stays_at_the_edges() -> None:
    users = {
        name_of(path) for path in ALL if any(is_within(name, {"specpool.v1", "google"}) for name in imported(path))
    }
    assert {name for name in users if not name.startswith(EDGES)} == set()
    assert "coordinator/serving/service.py" in users


def test_only_one_module_knows_opentelemetry() -> None:
    users = [name_of(path) for path in ALL if "opentelemetry" in top_levels(path)]
    assert users == ["specpool/rpc/observability/tracing.py"]


def test_only_one_folder_knows_the_gateway_and_it_is_loaded_when_asked_for() -> None:
    users = {name_of(path.parent) for path in ALL if "smg_grpc_proto" in top_levels(path)}
    assert users == {"coordinator/smg"}
    program = "import coordinator.server, specpool, sys; sys.exit('smg_grpc_proto' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_what_a_user_imports_and_the_coordinator_load_neither_torch_nor_opentelemetry() -> None:
    folders = {
        "specpool/client",
        "specpool/cli",
        "specpool/protocol",
        "specpool/rpc",
        "specpool/testing",
        "coordinator",
    }
    modules = [module_of(path) for path in ALL if name_of(path).startswith((*folders, "specpool/worker"))]
    program = f"import specpool, {', '.join(modules)}, sys; "
    program += "assert specpool.Client; sys.exit(bool({'torch', 'opentelemetry'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_the_engine_loads_no_grpc() -> None:
    program = "import specpool.engine.startup.loading, sys; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
