"""The network between the hosts: its delay and loss, and hosts that are cut off from it."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from deploy.trial.namespaces import ADDRESSES, TrialError, namespace, namespaces, run
from deploy.trial.switch import DEVICE, Conditions, Counts


class Network:
    """The hosts, joined by a switch. At first the network is as good as it can be."""

    def __init__(self, switch: "subprocess.Popen[str]") -> None:
        self._switch = switch
        self._conditions = Conditions()
        self.counts = self._read_counts()
        for host, address in ADDRESSES.items():
            run("ip", "-n", namespace(host), "address", "add", f"{address}/24", "dev", DEVICE)
            run("ip", "-n", namespace(host), "link", "set", DEVICE, "up")

    def impair(self, delay: float, loss: float) -> str:
        """Delays every packet by `delay` seconds each way and loses a share `loss`; returns what does it: the kernel's
        netem where there is one, otherwise the switch."""
        netem = ("netem", "delay", f"{1000 * delay:g}ms", "loss", f"{100 * loss:g}%")
        try:
            for host in ADDRESSES:
                run("tc", "-n", namespace(host), "qdisc", "add", "dev", DEVICE, "root", *netem)
        except TrialError:
            self._set(replace(self._conditions, delay=delay, loss=loss))
            return "userspace switch"
        return "netem"

    def cut_off(self, hosts: Iterable[str]) -> None:
        """Drops every packet to and from these hosts, and no others, from now on."""
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
    """Hosts that reach each other. `seed`: seed of the choice of lost packets."""
    command, pipe = [sys.executable, "-m", "deploy.trial.switch", str(seed)], subprocess.PIPE
    # The switch has a session of its own, so that a terminal's signals reach only us; it ends with its input.
    with (
        namespaces(),
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as switch,
    ):
        try:
            yield Network(switch)
        finally:
            switch.kill()
