"""Compiles C code for this processor with the local C compiler, and caches the libraries for later starts."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specpool.engine.native.library_cache import (
    candidate_folders,
    check_file,
    private_folder,
    read_cached,
    write_cached,
    write_private,
)

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
POOL, VECTORS = FOLDER / "pool.h", FOLDER / "vectors.h"
"""Headers that several libraries share."""
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-pthread", "-fPIC", "-shared", "-Wno-psabi")
NATIVE = {"x86_64": "-march=native"}
"""Flags that select this machine's processor; -mcpu=native on machines that are not listed."""
LIBRARY = "library.so"
VARIABLES = ("CC", "DECODER_CFLAGS")
"""Environment variables with the compiler and further flags."""
HEADER_PATHS = ("CPATH", "C_INCLUDE_PATH")
"""Environment variables that add header folders."""
COMPILE_SECONDS, QUERY_SECONDS = 60.0, 10.0
CACHE_FOLDER, MAX_CACHED = "compiled", 64
"""The folder of cached libraries, in the first candidate folder, and their maximum number."""

Command = tuple[str, ...]
Sources = tuple[tuple[str, str], ...]


def compile_library(
    purpose: str,
    sources: Sequence[Path],
    macros: Sequence[str] = (),
    flags: Sequence[str] = (),
    folders: Sequence[Path] = (),
) -> ctypes.CDLL | None:
    """Compile a library; None if this machine cannot.

    `purpose`: subject of its log lines. `sources`: the C file, then its headers. `macros`: flags that define constants.
    $DECODER_CFLAGS follow them: `-march=x86-64-v3` compiles for another processor. `flags`: the last flags, which
    nothing overrides. `folders`: candidates for private folders, best first, instead of the user's.
    """
    if (problem := compiler_problem()) is not None:
        log.info("%s %s; using torch operations", purpose, problem[0])
        return None
    command = (
        *_words("CC", "cc"),
        *FLAGS,
        NATIVE.get(platform.machine(), "-mcpu=native"),
        *macros,
        *_words("DECODER_CFLAGS"),
        *flags,
    )
    code = tuple((source.name, source.read_text()) for source in sources)
    return _compile(purpose, command, code, tuple(folders or candidate_folders()))


def compiler_problem() -> tuple[str, str] | None:
    """Say what keeps this machine from compiling, as a predicate, and what would help, if anything; None if it can."""
    if platform.system() != "Linux":
        return "is compiled only on Linux", ""
    for name in VARIABLES:
        try:
            _words(name)
        except ValueError as error:
            reason = f"{str(error)[0].lower()}{str(error)[1:]}"
            return f"needs a C compiler, and ${name} cannot be parsed ({reason})", f"correct or unset {name}"
    compiler = _words("CC", "cc")
    if compiler and shutil.which(compiler[0]) is not None:
        return None
    if "CC" not in os.environ:
        return "needs a C compiler", "install a C compiler"
    found = f"$CC ({compiler[0]}) does not exist" if compiler else "$CC is empty"
    return f"needs a C compiler, and {found}", "correct or unset CC"


def _words(name: str, default: str = "") -> list[str]:
    """The words of an environment variable. ValueError: quotes or escapes that do not end."""
    return shlex.split(os.environ.get(name, default))


@functools.cache
def _compile(purpose: str, command: Command, sources: Sources, folders: tuple[Path, ...]) -> ctypes.CDLL | None:
    """Load the library from the cache, or compile and cache it. None if that fails in every candidate folder."""
    reasons = []
    entry = _cache_entry(command, sources, folders[0])
    code = read_cached(entry) if entry is not None else None
    for parent in folders:
        try:
            with private_folder(parent) as folder:
                file = _build(command, sources, folder) if code is None else write_private(code, folder / LIBRARY)
                library = _load(file)
                if code is None and entry is not None:
                    write_cached(file.read_bytes(), entry, MAX_CACHED)
                return library
        except OSError as error:  # the folder cannot be created, or does not allow code to be loaded
            reasons.append(str(error))
        except subprocess.SubprocessError as error:  # it would fail in any folder
            reasons.append((getattr(error, "stderr", None) or str(error)).strip())
            break
    log.warning("compiling %s failed; it runs on torch operations: %s", purpose, "; ".join(reasons))
    return None


def _cache_entry(command: Command, sources: Sources, first: Path) -> Path | None:
    """The cache file of this command and these sources; None if the compiler does not identify itself.

    The name is a hash of everything that determines the code. `-###` prints what the compiler would run, which includes
    its version and this processor's features.
    """
    query = [*command, "-###", "-S", "-o", "-", "-x", "c", os.devnull]
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        answer = subprocess.run(query, check=True, capture_output=True, env=environment, timeout=QUERY_SECONDS).stderr
        answer = answer.replace(os.getcwdb(), b".")  # clang prints it
        folder = Path(os.path.realpath(first)) / CACHE_FOLDER
        inputs = (command, sources, *map(os.environ.get, HEADER_PATHS), answer)
    except (OSError, subprocess.SubprocessError):
        return None
    if b"cc1" not in answer:  # the actual compiler of both gcc and clang
        return None
    return folder / f"{hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]}.library"


def _build(command: Command, sources: Sources, folder: Path) -> Path:
    """Compile into a private folder, and rename the complete library. OSError, SubprocessError."""
    (name, _), partial = sources[0], folder / "library.part"
    for header, text in sources:
        (folder / header).write_text(text)
    subprocess.run(
        [*command, str(folder / name), "-o", str(partial), "-lm"],
        check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS,
    )  # fmt: skip
    partial.chmod(0o700)  # regardless of the umask
    return partial.rename(folder / LIBRARY)


def _load(file: Path) -> ctypes.CDLL:
    """Load a library; its `digest` is the SHA-256 of its code."""
    check_file(file)
    library: Any = ctypes.CDLL(str(file))
    library.digest = hashlib.sha256(file.read_bytes()).hexdigest()
    loaded: ctypes.CDLL = library
    return loaded
