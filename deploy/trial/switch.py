"""The switch process: it forwards IP packets between the hosts' TUN devices, with delay and loss.

    python -m deploy.trial.switch SEED

Each line of standard input is a JSON object of `Conditions`; the answer is a line with `Counts`. The process ends when
standard input closes, which removes the devices.
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
from dataclasses import asdict

from deploy.trial.hosts import ADDRESSES, DEVICE, Conditions, Counts, inside

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET_BYTES = 65_536
IPV4, DESTINATION, HEADER_BYTES = 4, slice(16, 20), 20


class Wire:
    """The packets in transit between all hosts."""

    def __init__(self, seed: int) -> None:
        """`seed`: chooses the lost packets."""
        self.conditions, self.counts = Conditions(), Counts()
        self._rng = random.Random(seed)
        self._in_transit: deque[tuple[float, str, bytes]] = deque()

    def send(self, source: str, destination: str, packet: bytes, now: float) -> None:
        """Take a packet at `now`, in seconds of a monotonic clock."""
        if source in self.conditions.cut_off or destination in self.conditions.cut_off:
            self.counts.dropped += 1
        elif self._rng.random() < self.conditions.loss:
            self.counts.lost += 1
        else:
            self._in_transit.append((now + self.conditions.delay, destination, packet))

    def arrived(self, now: float) -> Iterator[tuple[str, bytes]]:
        """Remove and yield the packets that have arrived, each with its destination."""
        while self._in_transit and self._in_transit[0][0] <= now:
            self.counts.forwarded += 1
            yield self._in_transit.popleft()[1:]

    def seconds_to_next(self, now: float) -> float | None:
        """Seconds until the next packet arrives; None: no packet is in transit."""
        return max(0.0, self._in_transit[0][0] - now) if self._in_transit else None


def main(seed: int) -> None:
    """Forward packets until standard input ends."""
    devices = {_open_device(host): host for host in ADDRESSES}
    descriptors = {host: descriptor for descriptor, host in devices.items()}
    hosts = {socket.inet_aton(address): host for host, address in ADDRESSES.items()}
    wire, orders = Wire(seed), sys.stdin.fileno()
    print(json.dumps(asdict(wire.counts)), flush=True)
    while True:
        readable, _, _ = select.select([*devices, orders], [], [], wire.seconds_to_next(time.monotonic()))
        for source in readable:
            if source != orders:
                packet = os.read(source, MAX_PACKET_BYTES)
                if len(packet) >= HEADER_BYTES and packet[0] >> 4 == IPV4 and packet[DESTINATION] in hosts:
                    wire.send(devices[source], hosts[packet[DESTINATION]], packet, time.monotonic())
            elif line := sys.stdin.readline():
                wire.conditions = Conditions(**json.loads(line))
                print(json.dumps(asdict(wire.counts)), flush=True)
            else:
                return
        for destination, packet in wire.arrived(time.monotonic()):
            with suppress(OSError):  # the device is not up
                os.write(descriptors[destination], packet)


def _open_device(host: str) -> int:
    with inside(host):
        descriptor = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


if __name__ == "__main__":
    main(int(sys.argv[1]))
