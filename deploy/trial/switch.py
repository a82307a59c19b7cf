"""A switch between the hosts, as a process: it forwards the IP packets of their TUN devices, with delay and loss.

    python -m deploy.trial.switch SEED

Each line of standard input is a JSON object with `Conditions`, answered by one with `Counts` so far. The
devices vanish with the process, which ends with its standard input.
"""

import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

from deploy.trial.namespaces import ADDRESSES, inside

DEVICE = "link0"
"""Name of the device of each host."""
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
LONGEST_PACKET = 65_536
IPV4, DESTINATION, HEADER_BYTES = 4, slice(16, 20), 20


@dataclass(frozen=True)
class Conditions:
    """What the network does to packets."""

    delay: float = 0.0
    """Seconds that every packet takes."""
    loss: float = 0.0
    """Probability that a packet is lost."""
    cut_off: tuple[str, ...] = ()
    """Hosts to and from which every packet is dropped."""


@dataclass
class Counts:
    """Numbers of packets."""

    forwarded: int = 0
    lost: int = 0
    """Packets lost at random."""
    dropped: int = 0
    """Packets to or from a host that was cut off."""


class Wire:
    """The packets under way between all hosts."""

    def __init__(self, seed: int) -> None:
        """`seed`: seed of the choice of lost packets."""
        self.conditions, self.counts = Conditions(), Counts()
        self._rng = random.Random(seed)
        self._under_way: deque[tuple[float, str, bytes]] = deque()

    def send(self, source: str, destination: str, packet: bytes, now: float) -> None:
        """Takes a packet at `now`, in seconds of a monotonic clock."""
        if source in self.conditions.cut_off or destination in self.conditions.cut_off:
            self.counts.dropped += 1
        elif self._rng.random() < self.conditions.loss:
            self.counts.lost += 1
        else:
            self._under_way.append((now + self.conditions.delay, destination, packet))

    def arrived(self, now: float) -> Iterator[tuple[str, bytes]]:
        """Takes off the packets that have arrived, each with its destination."""
        while self._under_way and self._under_way[0][0] <= now:
            self.counts.forwarded += 1
            yield self._under_way.popleft()[1:]

    def seconds_to_next(self, now: float) -> float | None:
        """Seconds until a packet arrives; None if none is under way."""
        return max(0.0, self._under_way[0][0] - now) if self._under_way else None


def main(seed: int) -> None:
    """Forwards packets until standard input ends."""
    devices = {_open_device(host): host for host in ADDRESSES}
    descriptors = {host: descriptor for descriptor, host in devices.items()}
    hosts = {socket.inet_aton(address): host for host, address in ADDRESSES.items()}
    wire = Wire(seed)
    _tell(wire)
    orders = sys.stdin.fileno()
    while True:
        readable, _, _ = select.select([*devices, orders], [], [], wire.seconds_to_next(time.monotonic()))
        for source in readable:
            if source != orders:
                packet = os.read(source, LONGEST_PACKET)
                is_ours = len(packet) >= HEADER_BYTES and packet[0] >> 4 == IPV4 and packet[DESTINATION] in hosts
                if is_ours:
                    wire.send(devices[source], hosts[packet[DESTINATION]], packet, time.monotonic())
            elif line := sys.stdin.readline():
                wire.conditions = Conditions(**json.loads(line))
                _tell(wire)
            else:
                return
        for destination, packet in wire.arrived(time.monotonic()):
            with suppress(OSError):  # its device is not up
                os.write(descriptors[destination], packet)


def _open_device(host: str) -> int:
    with inside(host):
        descriptor = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def _tell(wire: Wire) -> None:
    print(json.dumps(asdict(wire.counts)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
