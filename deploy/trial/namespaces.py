"""Hosts as network namespaces of Linux: creating, entering and removing them, with the processes inside."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = {"client": "10.77.0.1", "coordinator": "10.77.0.2", "draft": "10.77.0.3", "target": "10.77.0.4"}
"""Address of each host, in a network that exists only between the namespaces."""
PREFIX = "specpool-trial-"
LOCK = "\0specpool-trial"
"""Name of a socket that only one process can have; it vanishes with the process."""
CLONE_NEWNET = 0x40000000


class TrialError(Exception):
    """The trial cannot be run; the message is one line."""


def namespace(host: str) -> str:
    """Name of a host's namespace."""
    return PREFIX + host


def run(*command: str) -> str:
    """Runs a command, and returns what it prints. TrialError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrialError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


@contextmanager
def namespaces() -> Iterator[None]:
    """The namespaces of all hosts, without any devices yet. What a killed trial has left behind is removed first.

    TrialError, also if another trial is running.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(LOCK)
        except OSError:
            raise TrialError("another trial is running on this machine") from None
        clear()
        try:
            for host in ADDRESSES:
                run("ip", "netns", "add", namespace(host))
            yield
        finally:
            clear()


def clear() -> None:
    """Removes the namespaces of a trial, and kills the processes in them."""
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines()]
    for name in filter(lambda name: name.startswith(PREFIX), names):
        for pid in run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run("ip", "netns", "delete", name)


@contextmanager
def inside(host: str) -> Iterator[None]:
    """Lets the calling thread, and the threads and processes that it starts meanwhile, use the network of this host."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace(host)}", os.O_RDONLY)
    try:
        _enter(there)
        yield
    finally:
        _enter(before)
        os.close(before)
        os.close(there)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
