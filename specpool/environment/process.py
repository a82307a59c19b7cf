"""This process: its version, import path, usable CPUs, and its end by Ctrl-C."""

import os
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from specpool.environment.extras import require_extra

ROOT = Path(__file__).parents[2]


@cache  # the lookup reads package metadata from disk
def package_version() -> str:
    """Return the version of Specpool: the installed one, or the checkout's. Raises OSError if there is neither."""
    return _installed_version() or str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that lets a process import an uninstalled checkout; {} if Specpool is installed.

    `environment`: the other variables of the process.
    """
    if _installed_version() is not None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))}


@cache
def _installed_version() -> str | None:
    try:
        return version("specpool")
    except PackageNotFoundError:
        return None


def usable_cpus() -> int:
    """Return how many CPUs this process may use: those of its affinity mask where the system has one, otherwise all."""
    if hasattr(os, "sched_getaffinity"):  # Linux; Python 3.13 has `os.process_cpu_count`
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def silent_interrupts() -> Iterator[None]:
    """Let Ctrl-C end this process without a stack trace, unless the process ignores or handles it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, before)


@contextmanager
def quiet_broken_pipes() -> Iterator[None]:
    """Exit with status 1 and no message if the reader of standard output, such as `head`, has closed the pipe."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        sys.exit(1)


def run_command(main: Callable[[], None]) -> None:
    """Run a command. Ctrl-C ends the process with status 130."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)


def start_server(program: str, extra: str, module: str) -> None:
    """Run the `main` of a server's module. Exit with one line if it lacks modules of the extra."""
    with silent_interrupts():  # until the server handles signals
        require_extra(program, extra)
        import_module(module).main()
