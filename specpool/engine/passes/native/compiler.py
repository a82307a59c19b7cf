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
from pathlib import Path
from typing import Any

from specpool.engine.passes.native.folders import check_file, keep, places, private_folder, read_kept, write

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decoder.c")
INCLUDED = ("products.h", "panels.h", "vectors.h")
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
NATIVE = {"x86_64": "-march=native"}
"""Flags that select the own processor, by machine; on all other machines it is -mcpu=native."""
LIBRARY = "decoder.so"
SEARCHED = ("CPATH", "C_INCLUDE_PATH")
"""Variables that name further folders of headers."""
TIMEOUT_SECONDS, ANSWER_SECONDS = 60.0, 10.0
KEPT, MOST_KEPT = "compiled", 64
"""The folder of kept libraries, in the first of `places()`, and the greatest number of them."""


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
    """The library that an earlier process kept for this command and these sources, or a new one, which is kept if that
    is possible; None if none can be compiled and loaded."""
    reasons = []
    kept = _kept_file(command, sources)
    code = read_kept(kept) if kept is not None else None
    for place in places():
        try:
            with private_folder(place) as folder:
                file = _build(command, sources, folder) if code is None else write(code, folder / LIBRARY)
                library = _load(file)
                if code is None and kept is not None:
                    keep(file.read_bytes(), kept, MOST_KEPT)
                return library
        except OSError as error:  # no such folder can be made here, or no code can be loaded from it
            reasons.append(str(error))
        except subprocess.SubprocessError as error:  # it would not compile in another folder either
            reasons.append((getattr(error, "stderr", None) or str(error)).strip())
            break
    reason = "; ".join(reasons)
    log.warning("the forward pass could not be compiled, and runs on torch's operations: %s", reason)
    return None


def _kept_file(command: tuple[str, ...], sources: tuple[tuple[str, str], ...]) -> Path | None:
    """Where the library of this command and these sources is kept; None if that cannot be found out.

    It is named by everything that it is made of. The compiler is asked what it would run, which names its version and
    this processor's features.
    """
    asked = [*command, "-###", "-S", "-o", "-", "-x", "c", os.devnull]
    english = {**os.environ, "LC_ALL": "C"}
    try:
        answer = subprocess.run(asked, check=True, capture_output=True, env=english, timeout=ANSWER_SECONDS).stderr
        answer = answer.replace(os.getcwdb(), b".")  # which clang names
        folder = Path(os.path.realpath(places()[0])) / KEPT
        made_of = (command, sources, _openmp(), *map(os.environ.get, SEARCHED), answer)
    except (OSError, subprocess.SubprocessError):
        return None
    if b"cc1" not in answer:  # gcc's and clang's compiler proper
        return None
    return folder / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]}.kept"


def _build(command: tuple[str, ...], sources: tuple[tuple[str, str], ...], folder: Path) -> Path:
    """Compiles into a private folder; returns the library, which is whole if it is there. OSError, SubprocessError."""
    file, unfinished = folder / SOURCE.name, folder / "decoder.part"
    for name, text in sources:
        (folder / name).write_text(text)
    subprocess.run(
        [*command, str(file), "-o", str(unfinished), *_openmp(), "-lm"],
        check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    unfinished.chmod(0o700)  # whatever the umask
    return unfinished.rename(folder / LIBRARY)


def _load(file: Path) -> ctypes.CDLL:
    """Loads a library; its `digest` is the SHA-256 of its code."""
    check_file(file)
    library: Any = ctypes.CDLL(str(file))
    library.digest = hashlib.sha256(file.read_bytes()).hexdigest()
    loaded: ctypes.CDLL = library
    return loaded


def _openmp() -> list[str]:
    """The OpenMP library that torch has loaded: a second one would start threads that compete with torch's own."""
    loaded = re.findall(r"/.*/libgomp.*", Path("/proc/self/maps").read_text())
    return ["-Wl,--as-needed", loaded[0]] if loaded else []
