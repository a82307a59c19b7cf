"""Optional dependencies: the modules of each extra, and the command that installs it."""

import json
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

MODULES = {
    "cli": ("grpc_health", "platformdirs", "pydantic", "pydantic_settings", "rich"),
    "http": ("prometheus_client", "starlette", "uvicorn"),
    "coordinator": ("grpc_reflection", "jinja2", "prometheus_client", "tokenizers", "transformers"),
    "worker": ("torch", "accelerate", "gguf", "numpy", "psutil"),
    "vllm": ("grpc_health", "pydantic", "pydantic_settings"),
    "bench": ("jsonschema", "matplotlib"),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"),
    "smg": ("smg_grpc_proto",),
    "constraints": ("llguidance",),
}
"""Modules that the distributions of each extra provide, one of each, in the order of pyproject.toml."""
INCLUDED = {"http": "cli", "coordinator": "cli", "worker": "coordinator"}
"""The extra that an extra's processes also import. `worker` installs `http` too, for a separate process."""
MAX_NAMED = 3
"""Maximum number of missing modules that a message names."""


class Source(NamedTuple):
    """Where this package was installed from: a checkout or a wheel."""

    path: Path
    is_editable: bool


def missing_modules(extra: str) -> list[str]:
    """Return the modules of the extra, and of those that it includes, that are not installed."""
    included = missing_modules(INCLUDED[extra]) if extra in INCLUDED else []
    return [*(module for module in MODULES[extra] if not _is_installed(module)), *included]


def explain_missing(extra: str) -> str | None:
    """Return what the extra lacks and the command that installs it, in one line. None if nothing is missing."""
    modules = missing_modules(extra)
    if not modules:
        return None
    others = f" and {len(modules) - MAX_NAMED} more" if len(modules) > MAX_NAMED else ""
    return f"needs {', '.join(modules[:MAX_NAMED])}{others}: {install_command(extra)}"


def require_extra(program: str, extra: str, suggested: str | None = None) -> None:
    """Exit with status 1 and one line on stderr if modules of the extra are missing.

    `suggested`: the extra to suggest, if the program needs more than it checks here.
    """
    if missing_modules(extra):
        sys.exit(f"{program}: {explain_missing(suggested or extra)}")


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    own_pip = Path(sys.executable).with_name("pip")
    pip = "pip" if shutil.which("pip") == str(own_pip) else f"{sys.executable} -m pip"
    source = installed_from()
    if source is None:
        return f"{pip} install '.[{extra}]' in a checkout of Specpool"
    return f"{pip} install {'--editable ' if source.is_editable else ''}'{source.path}[{extra}]'"


def installed_from() -> Source | None:
    """Return the checkout or wheel that pip installed this package from. None if it was another one, or has gone."""
    try:
        recorded = distribution("specpool").read_text("direct_url.json")  # PEP 610
    except PackageNotFoundError:
        return None
    origin: dict[str, Any] = json.loads(recorded or "{}")
    url = urlsplit(origin.get("url", ""))
    path = Path(unquote(url.path))
    if url.scheme != "file" or not path.exists():
        return None
    return Source(path, is_editable=bool(origin.get("dir_info", {}).get("editable")))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
