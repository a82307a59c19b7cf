"""Stores self-test results and step times, so a restart with the same model and CPU can skip both.

A proof belongs to one compiled pass. Its key covers the bits of the weights, the configuration, the options, the
processor, the versions and the engine's own source. A start that uses a proof recomputes the logits of a fixed
sequence; unless they are bit-identical, it discards the proof.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch
import transformers
from pydantic import BaseModel, ValidationError

import specpool.engine
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import LoadedModel
from specpool.engine.native.library_cache import candidate_folders, make_private, read_cached, write_cached
from specpool.environment.process import usable_cpus

log = logging.getLogger(__name__)

FOLDER, SUFFIX, MAX_PROOFS = "proofs", ".proof", 64
LOCK, LOCK_SECONDS, POLL_SECONDS = "measuring.lock", 60.0, 0.05
SOURCES = {".py", ".c", ".h"}
_IS_ALONE = ContextVar("is_alone", default=False)
CPU_FIELDS = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part"}
# Variables that change the kernels or threads of torch.
VARIABLES = re.compile(r"(ATEN|DNNL|ONEDNN|MKL|OMP|GOMP|KMP|OPENBLAS|TORCH)_\w+")


class Proof(BaseModel, frozen=True, extra="forbid"):
    """Self-test result and step times of one start."""

    key: str
    library: str
    """SHA-256 of the compiled pass."""
    logits: str
    """SHA-256 of the logits of a fixed sequence."""
    bitwise: bool
    step_seconds: dict[int, float]
    seconds_per_cached: float


def proof_key(loaded: LoadedModel, options: EngineOptions, exact: bool, weights_fingerprint: str) -> str:
    """SHA-256 over everything that a proof depends on, except the compiled pass itself."""
    facts = {
        "weights": weights_fingerprint,
        "config": loaded.config.to_json_string(),
        "options": options.model_dump(mode="json", exclude={"model", "revision"}),
        "max_model_len": loaded.max_model_len,
        "exact": exact,
        "threads": (torch.get_num_threads(), usable_cpus()),
        "cpu": (_cpu(), torch.backends.cpu.get_cpu_capability()),
        "variables": sorted(item for item in os.environ.items() if VARIABLES.fullmatch(item[0])),
        "versions": (platform.python_version(), torch.__version__, transformers.__version__),
        "source": _source_digest(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_proof(key: str) -> Proof | None:
    """Read the proof of this key. None if it is missing or damaged, or if another user could have written it."""
    content = read_cached(_file(key))
    if content is None:
        return None
    try:
        proof = Proof.model_validate_json(content)
    except ValidationError:
        return None
    return proof if proof.key == key else None


def write_proof(proof: Proof) -> None:
    """Store a proof for later starts, if the cache folder allows it."""
    write_cached(proof.model_dump_json().encode(), _file(proof.key), MAX_PROOFS)


@contextmanager
def measuring_alone(report: Callable[[str], None] = log.info) -> Iterator[None]:
    """Wait up to LOCK_SECONDS while another worker on this machine measures: concurrent measurements run too slowly.

    `report`: called before a wait. Nested calls do not wait: a worker may load its draft while it measures the target.
    """
    if _IS_ALONE.get():
        yield
        return
    path, file = _folder() / LOCK, -1
    try:
        make_private(_folder())
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _lock(file, report)
    except OSError as error:  # some network file systems support no locks
        log.info("cannot lock %s (%s); other workers may measure at the same time", path, error)
    alone = _IS_ALONE.set(True)
    try:
        yield
    finally:
        _IS_ALONE.reset(alone)
        if file >= 0:
            os.close(file)


def _lock(file: int, report: Callable[[str], None]) -> None:
    deadline, is_waiting = time.monotonic() + LOCK_SECONDS, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                log.warning("another worker has been measuring for %g s; not waiting any longer", LOCK_SECONDS)
                return
            if not is_waiting:
                report("waiting for another worker to measure its passes")
            is_waiting = True
            time.sleep(POLL_SECONDS)


def _folder() -> Path:
    return Path(os.path.realpath(candidate_folders()[0])) / FOLDER


def _file(key: str) -> Path:
    return _folder() / f"{key[:32]}{SUFFIX}"


@cache
def _source_digest() -> str:
    """SHA-256 of the engine's source, which may change without a new version number."""
    root = Path(str(specpool.engine.__file__)).parent
    digest = hashlib.sha256()
    for file in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _cpu() -> list[str]:
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [platform.machine(), *(line for line in first if line.partition(":")[0].strip() in CPU_FIELDS)]
