"""Compiles the forward pass for this processor, with the C compiler of this machine, and keeps it for later starts."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from engine.passes.native.folders import check_file, check_folder, keep, places, private_folder

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decoder.c")
INCLUDED = ("products.h", "panels.h", "vectors.h")
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
NATIVE = {"x86_64": "-march=native"}
"""Flags that select the own processor, by machine; on all other machines it is -mcpu=native."""
TIMEOUT_SECONDS = 60.0
KEPT, MOST_KEPT = "compiled", 32
"""The folder of libraries that are kept, in the first of all places, and how many are kept."""


def compile_decoder(head_dim: int, groups: int, kinds: Collection[str], measured: bool = False) -> ctypes.CDLL | None:
    """The library for heads of this size and `groups` query heads per KV head; None if this machine cannot compile it.

    `kinds`: those of the weights, by their names in panels.h. `measured`: the library measures the time of its stages.
    $DECODER_CFLAGS are passed to the compiler last: `-march=x86-64-v3` compiles for another processor.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None or platform.system() != "Linux":
        log.info("no C compiler: the forward pass runs on torch's operations")
        return None
    processor = NATIVE.get(platform.machine(), "-mcpu=native")
    sizes = (f"-DHEAD_DIM={head_dim}", f"-DGROUPS={groups}")
    chosen = "-DKINDS(X)=" + " ".join(f"X({kind})" for kind in sorted(kinds))
    stages = ["-DMEASURED"] if measured else []
    own = shlex.split(os.environ.get("DECODER_CFLAGS", ""))
    sources = tuple((name, SOURCE.with_name(name).read_text()) for name in (SOURCE.name, *INCLUDED))
    return _compile((*compiler, *FLAGS, processor, *sizes, chosen, *stages, *own), sources)


@functools.cache
def _compile(command: tuple[str, ...], sources: tuple[tuple[str, str], ...]) -> ctypes.CDLL | None:
    """The library that was kept of these sources, or a new one, which is kept where that is possible."""
    reasons = []
    identity = _identity(command, sources)
    kept = places()[0].resolve() / KEPT / f"{identity}.so"
    if identity is not None:
        with suppress(OSError):  # it is not there, or not whole, or somebody else could have written it
            check_folder(kept.parent)
            return _load(kept)
    for place in places():
        try:
            with private_folder(place) as folder:
                library = _load(built := _build(command, sources, folder))
                if identity is not None:
                    with suppress(OSError):
                        keep(built, kept, MOST_KEPT)
                return library
        except OSError as error:  # no such folder can be made here, or no code can be loaded from it
            reasons.append(str(error))
        except subprocess.SubprocessError as error:  # it would not compile in another folder either
            reasons.append((getattr(error, "stderr", None) or str(error)).strip())
            break
    reason = "; ".join(reasons)
    log.warning("the forward pass could not be compiled, and runs on torch's operations: %s", reason)
    return None


def _identity(command: tuple[str, ...], sources: tuple[tuple[str, str], ...]) -> str | None:
    """Hash of everything that a library is made of; None if that cannot be found out.

    The compiler is asked what it would run: that names its version and all features of this processor.
    """
    asked = [*command, "-###", "-S", "-o", "-", "-x", "c", os.devnull]
    try:
        answer = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    made_of = repr((command, sources, _openmp(), answer))
    return hashlib.sha256(made_of.encode()).hexdigest()[:32] if answer.strip() else None


def _build(command: tuple[str, ...], sources: tuple[tuple[str, str], ...], folder: Path) -> Path:
    """Compiles into a private folder; returns the library, which is whole if it is there. OSError, SubprocessError."""
    file, unfinished, library = folder / SOURCE.name, folder / "decoder.part", folder / "decoder.so"
    for name, text in sources:
        (folder / name).write_text(text)
    subprocess.run(
        [*command, str(file), "-o", str(unfinished), *_openmp(), "-lm"],
        check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    unfinished.chmod(0o700)  # whatever the umask
    return unfinished.rename(library)


def _load(library: Path) -> ctypes.CDLL:
    check_file(library)
    return ctypes.CDLL(str(library))


def _openmp() -> list[str]:
    """The OpenMP library that torch has loaded: a second one would start threads that compete with torch's own."""
    loaded = re.findall(r"/.*/libgomp.*", Path("/proc/self/maps").read_text())
    return ["-Wl,--as-needed", loaded[0]] if loaded else []
