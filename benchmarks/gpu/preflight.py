"""Checks within seconds that the machine can run the other parts: packages, graph capture, rates."""

import platform
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu.engines import bandwidths, gemm_rate
from benchmarks.gpu.part import Findings, Settings, describe
from specpool.engine.passes.gpu.graphs import CudaGraphs
from specpool.environment.extras import missing_modules

PACKAGES = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "pydantic")
EXTRAS = ("worker", "constraints", "bench")
# Minimum seconds left to start a check.
CHECK_SECONDS = 2


def measure_preflight(settings: Settings, findings: Findings) -> None:
    """Describe the machine, capture graphs, measure rates. This process does not restrict cuBLAS."""
    findings.add(**description(torch.device(settings.device)))
    findings.add(missing=[module for extra in EXTRAS for module in missing_modules(extra)])
    if torch.device(settings.device).type == "cuda":
        findings.attempt(settings, "a capture", CHECK_SECONDS, partial(add_capture, findings))
        findings.attempt(settings, "a capture after a failure", CHECK_SECONDS, partial(add_failing_capture, findings))
    findings.add(**{name: round(rate / 1e9, 1) for name, rate in bandwidths(settings)})
    findings.add(gemm_tflops=round(gemm_rate(settings) / 1e12, 2))


def description(device: torch.device) -> dict[str, Any]:
    """Names, versions and sizes."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, **dict(map(_version_of, PACKAGES))}
    if device.type != "cuda":
        return {"name": platform.machine(), **versions}
    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": facts.name, **versions, "architecture": f"sm_{facts.major}{facts.minor}",
        "processors": facts.multi_processor_count, "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
    }  # fmt: skip


def add_capture(findings: Findings) -> None:
    """Capture a graph and replay it."""
    findings.add(captures=_captures(CudaGraphs()))


def add_failing_capture(findings: Findings) -> None:
    """Fail a capture, empty the cache, and capture again, as an engine does."""
    graphs, x = CudaGraphs(), torch.zeros(4, device="cuda")
    try:
        graphs(lambda: x + x.sum().item())  # a capture cannot wait
    except RuntimeError as error:
        findings.add(failed_capture=describe(error))
    torch.cuda.empty_cache()
    findings.add(captures_after_failure=_captures(graphs))


def _captures(graphs: CudaGraphs) -> bool:
    x = torch.zeros(4, device="cuda")
    replay, result = graphs(lambda: x + 1)
    x.fill_(2)
    replay()
    return result.tolist() == [3.0] * 4


def _version_of(package: str) -> tuple[str, str | None]:
    try:
        return package, version(package)
    except PackageNotFoundError:
        return package, None
