"""Hosts as Linux network namespaces, joined by a network with delay, loss and cut-off hosts."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

ADDRESSES = {"client": "10.77.0.1", "coordinator": "10.77.0.2", "draft": "10.77.0.3", "target": "10.77.0.4"}
"""Address of each host, in a network that exists only between the namespaces."""
PREFIX = "specpool-trial-"
LOCK = "\0specpool-trial"
"""Name of an abstract socket, which one process can bind at a time."""
DEVICE = "link0"
"""Name of each host's device."""
CLONE_NEWNET = 0x40000000


class TrialError(Exception):
    """The trial cannot run; the message is one line."""


@dataclass(frozen=True)
class Conditions:
    """Delay in seconds and probability of loss for every packet, and hosts that neither send nor receive."""

    delay: float = 0.0
    loss: float = 0.0
    cut_off: tuple[str, ...] = ()


@dataclass
class Counts:
    """Packets forwarded, lost at random, and dropped at a host that was cut off."""

    forwarded: int = 0
    lost: int = 0
    dropped: int = 0


class Network:
    """The hosts, joined by a switch; at first without delay or loss."""

    def __init__(self, switch: "subprocess.Popen[str]") -> None:
        self._switch = switch
        self._conditions = Conditions()
        self.counts = self._read_counts()
        for host, address in ADDRESSES.items():
            run("ip", "-n", namespace(host), "address", "add", f"{address}/24", "dev", DEVICE)
            run("ip", "-n", namespace(host), "link", "set", DEVICE, "up")

    def impair(self, delay: float, loss: float) -> str:
        """Delay packets by `delay` seconds each way and drop a share `loss` of them.

        Returns "netem", or "userspace switch" if the kernel has no netem.
        """
        netem = ("netem", "delay", f"{1000 * delay:g}ms", "loss", f"{100 * loss:g}%")
        try:
            for host in ADDRESSES:
                run("tc", "-n", namespace(host), "qdisc", "add", "dev", DEVICE, "root", *netem)
        except TrialError:
            self._set(replace(self._conditions, delay=delay, loss=loss))
            return "userspace switch"
        return "netem"

    def cut_off(self, hosts: Iterable[str]) -> None:
        """Drop all packets of these hosts from now on. Reconnect all others."""
        self._set(replace(self._conditions, cut_off=tuple(hosts)))

    def _set(self, conditions: Conditions) -> None:
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(asdict(conditions)) + "\n")
        self._switch.stdin.flush()
        self._conditions, self.counts = conditions, self._read_counts()

    def _read_counts(self) -> Counts:
        assert self._switch.stdout is not None
        if not (line := self._switch.stdout.readline()):
            raise TrialError("the switch between the hosts has ended")
        return Counts(**json.loads(line))


@contextmanager
def network(seed: int) -> Iterator[Network]:
    """Hosts that reach each other. `seed`: chooses the lost packets. TrialError, also if another trial is running."""
    command, pipe = [sys.executable, "-m", "deploy.trial.switch", str(seed)], subprocess.PIPE
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(LOCK)
        except OSError:
            raise TrialError("another trial is running on this machine") from None
        remove_namespaces()  # of a killed trial
        try:
            for host in ADDRESSES:
                run("ip", "netns", "add", namespace(host))
            # A session of its own keeps a terminal's signals from the switch.
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as switch:
                try:
                    yield Network(switch)
                finally:
                    switch.kill()
        finally:
            remove_namespaces()


def namespace(host: str) -> str:
    """Name of a host's namespace."""
    return PREFIX + host


def run(*command: str) -> str:
    """Run a command and return its output. TrialError: it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrialError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def remove_namespaces() -> None:
    """Remove the namespaces of a trial, and kill the processes in them."""
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines()]
    for name in filter(lambda name: name.startswith(PREFIX), names):
        for pid in run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run("ip", "netns", "delete", name)


@contextmanager
def inside(host: str) -> Iterator[None]:
    """Move this thread, and threads and processes that it starts meanwhile, into a host's network."""
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
