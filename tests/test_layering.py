"""Rules for imports between packages, checked in the sources and, for torch, by the modules that really get loaded."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "specpool", "protocol", "coordinator", "worker", "draft_worker", "target_worker", "engine", "rpc",
    "distill", "planning",
)  # fmt: skip
GENERATED = "specpool/v1/"

# Packages that the files of a folder must not import directly; indirect imports are not checked.
WORKERS = {"draft_worker", "target_worker"}
FORBIDDEN = {
    "protocol": {"torch", "grpc", "coordinator", "engine", "worker", "rpc", *WORKERS},
    "rpc": {"torch", "coordinator", "engine", "protocol.rounds", "protocol.codec", "worker", *WORKERS},
    "specpool/client": {"torch", "coordinator", "engine", "worker", "protocol", *WORKERS},
    "specpool/cli": {"torch", "worker", *WORKERS},
    # vLLM takes the coordinator's place: the coordinator's own parts draft for it, and vLLM loads our class itself.
    "specpool/vllm": {"torch", "vllm", "numpy", "engine", "worker", "specpool.client", "specpool.cli", *WORKERS},
    "coordinator": {"torch", "engine", "worker", "specpool.client", "specpool.cli", *WORKERS},
    "worker": {"torch", "coordinator", "engine", *WORKERS},
    "draft_worker": {"coordinator", "target_worker"},
    "target_worker": {"coordinator", "draft_worker"},
    "engine": {"grpc", "google", "specpool", "rpc", "coordinator", "worker", *WORKERS, "distill"},
    "engine/cache": {"engine.passes", "engine.models", "engine.probes", "engine.engine"},
    "engine/passes": {"engine.models", "engine.probes", "engine.engine"},
    "engine/models": {"engine.probes", "engine.engine"},
    "distill": {"coordinator", "specpool", "worker", *WORKERS},
    "planning": {"grpc", "google", "specpool.v1", "worker", *WORKERS},
}
ALLOWED = {"specpool/cli": {"worker.settings"}}
# Folders without torch, protobuf, a clock or a random generator of their own, and project packages they may import.
PURE = {
    "coordinator/scheduling": {"coordinator.scheduling", "coordinator.text", "protocol"},
    "coordinator/drafting": {"coordinator.drafting", "coordinator.scheduling", "coordinator.counters", "protocol"},
}
PURE_BESIDE_VLLM = ("costs", "drafter", "pacing", "rows")
PURE_IN_PLANNING = ("capacity", "plan", "prediction", "scaling", "values")
IMPURE = {"grpc", "google", "specpool", "rpc", "torch", "time", "asyncio", "threading", "datetime", "random", "logging"}
FILES_A_LEVEL = 14

MAY_NAME_STATUS_CODES = {
    "rpc/errors.py",
    "rpc/interceptor.py",
    "rpc/tracing.py",  # those of OpenTelemetry
    "coordinator/workers/streams.py",
    "coordinator/workers/draft_link.py",
    "coordinator/workers/link.py",
    "coordinator/workers/target_link.py",
    "specpool/testing/fakes.py",
    "specpool/testing/garbage.py",
    "specpool/client/retries.py",
    "specpool/cli/health.py",
}
MAY_USE_PROTOBUF = {
    "protocol/answers.py",
    "protocol/codec.py",
    "coordinator/intake.py",
    "coordinator/prompts/reading.py",
    "coordinator/server.py",
    "coordinator/service.py",
    "coordinator/smg/answers.py",
    "coordinator/smg/requests.py",
    "coordinator/validation.py",
    "draft_worker/server.py",
    "draft_worker/service.py",
    "target_worker/server.py",
    "target_worker/service.py",
    "worker/servicer.py",
}
ALSO_AT_THE_EDGE = ("specpool/", "rpc/", "coordinator/workers/")


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    return [path for path in files if not name_of(path).startswith(GENERATED)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def top_levels(path: Path) -> set[str]:
    return set(map(top_of, imported(path)))


def top_of(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_nothing_it_must_not(folder: str) -> None:
    assert sources(folder)
    broken = {
        (name_of(path), name)
        for path in sources(folder)
        for name in imported(path)
        if any(is_within(name, package) for package in FORBIDDEN[folder])
        and not any(is_within(name, package) for package in ALLOWED.get(folder, ()))
    }
    assert broken == set()


def test_the_check_sees_imports() -> None:
    assert "torch" in set().union(*map(top_levels, sources("engine")))
    assert "grpc" in top_levels(ROOT / "coordinator/workers/link.py")


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports under `TYPE_CHECKING` count too. CycleError names the modules."""
    paths = {module_of(path): path for package in PACKAGES for path in sources(package)}

    def owner(name: str) -> str | None:
        return name if name in paths else next(iter({name.rpartition(".")[0]} & paths.keys()), None)

    graph = {module: {owner(name) for name in imported(path)} - {None} for module, path in paths.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("folder", PURE)
def test_scheduling_and_drafting_import_neither_transport_nor_model_nor_clock(folder: str) -> None:
    for path in sources(folder):
        assert top_levels(path) & IMPURE == set(), name_of(path)
        own = {name for name in imported(path) if top_of(name) in PACKAGES}
        assert {name for name in own if not any(is_within(name, pure) for pure in PURE[folder])} == set()


@pytest.mark.parametrize("module", PURE_IN_PLANNING)
def test_predictions_import_neither_model_nor_clock(module: str) -> None:
    path = ROOT / "planning" / f"{module}.py"
    assert top_levels(path) & IMPURE == set()
    pure = {"coordinator.drafting.costs", "distill.replay", *(f"planning.{name}" for name in PURE_IN_PLANNING)}
    own = {name.rpartition(".")[0] for name in imported(path) if top_of(name) in PACKAGES}
    assert own <= pure


@pytest.mark.parametrize("module", PURE_BESIDE_VLLM)
def test_what_drafts_for_vllm_is_as_pure_as_drafting(module: str) -> None:
    path = ROOT / "specpool/vllm" / f"{module}.py"
    assert top_levels(path) & (IMPURE - {"specpool"}) == set()
    pure = {*PURE["coordinator/drafting"], *(f"specpool.vllm.{name}" for name in PURE_BESIDE_VLLM)}
    own = {name for name in imported(path) if top_of(name) in PACKAGES}
    assert {name for name in own if not any(is_within(name, allowed) for allowed in pure)} == set()


@pytest.mark.parametrize("package", ["coordinator", "engine"])
def test_a_folder_is_small_enough_to_be_read(package: str) -> None:
    folders = {path.parent for path in sources(package)}
    counts = {name_of(folder): len([*folder.glob("*.py")]) - 1 for folder in folders}
    assert {name: count for name, count in counts.items() if count > FILES_A_LEVEL} == {}


def test_only_the_error_table_and_clients_name_status_codes() -> None:
    files = [path for package in PACKAGES for path in sources(package)]
    named = {name_of(path) for path in files if "StatusCode" in path.read_text()}
    assert named - MAY_NAME_STATUS_CODES == set()
    assert "rpc/errors.py" in named


def test_protobuf_stays_at_the_edges() -> None:
    files = [path for package in PACKAGES for path in sources(package)]
    users = {name_of(path) for path in files if any(is_within(name, "specpool.v1") for name in imported(path))}
    users |= {name_of(path) for path in files if "google" in top_levels(path)}
    assert {name for name in users - MAY_USE_PROTOBUF if not name.startswith(ALSO_AT_THE_EDGE)} == set()
    assert "coordinator/service.py" in users


def test_only_one_module_knows_opentelemetry() -> None:
    files = [path for package in PACKAGES for path in sources(package)]
    assert [name_of(path) for path in files if "opentelemetry" in top_levels(path)] == ["rpc/tracing.py"]


def test_only_one_folder_knows_the_gateway_and_it_is_loaded_when_asked_for() -> None:
    files = [path for package in PACKAGES for path in sources(package)]
    users = {name_of(path.parent) for path in files if "smg_grpc_proto" in top_levels(path)}
    assert users == {"coordinator/smg"}
    program = "import coordinator.server, specpool, sys; sys.exit('smg_grpc_proto' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_what_a_user_imports_and_the_coordinator_load_neither_torch_nor_opentelemetry() -> None:
    files = [path for package in ("specpool", "protocol", "coordinator", "rpc", "worker") for path in sources(package)]
    modules = [module_of(path) for path in files]
    assert {"specpool", "coordinator.server"} <= set(modules)
    program = f"import {', '.join(modules)}, sys; sys.exit(bool({{'torch', 'opentelemetry'}} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
